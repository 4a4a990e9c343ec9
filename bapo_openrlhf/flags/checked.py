"""What the checks before a run hand on to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic


@dataclass(frozen=True)
class Checked:
    """What the checks before a run work out from its flags, its inputs and its checkpoints: `args.checked` of a run."""

    arithmetic: BatchArithmetic  # batch arithmetic of the configuration
    # Prompts that the run takes from the training data; None if the data is not on this machine.
    prompts: int | None = None
    candidates: int = 1  # prompts that the method draws for each prompt for which it generates responses
    # The folders with the rows that the run reads, as the value of each flag that names data.
    kept: Mapping[str, str] = field(default_factory=dict)
    evaluated: str | None = None  # `eval.dataset` as the user gave it
    resume_tag: str | None = None  # checkpoint from which the run continues; None if it starts from the beginning
    warnings: tuple[str, ...] = ()  # what may be meant, but is seldom what a user wants, a sentence each

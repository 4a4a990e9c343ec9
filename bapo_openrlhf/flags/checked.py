"""What the checks before a run hand on to it, and what this project's flags mean for OpenRLHF."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from bapo_openrlhf.adapt.filters import Between
from bapo_openrlhf.adapt.rewards import UNIT, as_fraction


@dataclass(frozen=True)
class Checked:
    """What the checks before a run work out from its flags, its inputs and its checkpoints: `args.checked` of a run."""

    # Prompts that the run takes from the training data; None if the data is not on this machine.
    prompts: int | None = None
    candidates: int = 1  # prompts that the method draws for each prompt for which it generates responses
    # The folders with the rows that the run reads, as the value of each flag that names data.
    kept: Mapping[str, str] = field(default_factory=dict)
    evaluated: str | None = None  # `eval.dataset` as the user gave it
    resume_tag: str | None = None  # checkpoint from which the run continues; None if it starts from the beginning
    warnings: tuple[str, ...] = ()  # what may be meant, but is seldom what a user wants, a sentence each


def signal_between(args: SimpleNamespace) -> Between | None:
    """Group mean rewards, mapped to [0, 1], that a group with a signal is between; None without dynamic filtering."""
    if not args.algo.dynamic_filtering_enable:
        return None
    low, high = args.adapt.rewards() or UNIT
    least, most = (
        end if math.isinf(end) else (as_fraction(end) - low) / (high - low) for end in args.algo.dynamic_filtering_range
    )
    return least, most


def set_openrlhf_flags(args: SimpleNamespace) -> None:
    """Set the flags of OpenRLHF through which it does what this project's flags ask for."""
    adapt = args.adapt
    if not adapt.enabled:
        return
    correction = args.algo.advantage
    if adapt.ratio == "decoupled" and correction.is_correction_level == "off":
        # The loss clips pi/prox and has the weight prox/alpha, truncated from above. OpenRLHF's token-level
        # importance-sampling correction is exactly this weight if the log-probs of alpha are the stored ones.
        correction.is_correction_level, correction.is_correction_mode = "token", "clip"
        correction.is_correction_gating = "ratio"
        correction.is_correction_threshold = [0.0, correction.is_correction_threshold[-1]]

"""ReLIFT: fine-tuning on the worked solutions of prompts that no response solves (arXiv 2506.07527).

Paper: "Learning What Reinforcement Learning Can't: Interleaved Online Fine-Tuning for Hardest Questions". What it
leaves open follows its authors' code (TheRoadQaQ/ReLIFT, folder relift/verl/verl/relift).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.group import Group, Prompt, prompt_state
from bapo_openrlhf.adapt.metric import declare
from bapo_openrlhf.methods.base import FilteredMethod, option


@dataclass(eq=False, kw_only=True)
class ReLIFT(FilteredMethod):
    """Fine-tunes on the worked solutions of prompts that no response solves, and trains on the others.

    The prompts that none of G responses solves wait for fine-tuning, if they have a solution. As soon as
    `finetune_batch` of them wait, the actor is fine-tuned on their worked solutions after the update of that step, with
    the mean of -log pi over all their tokens. Then they have left. A prompt that fails again waits again.

    Deviations: the prompts that have waited longest go first, and one that fails meanwhile waits only once. The
    authors' code fine-tunes with an Adam of its own. Here it is the actor's optimizer, with its learning rate of that
    step, in as many passes and steps as an update would make (`--train.max_epochs`, `--train.batch_size`). Their script
    adds an entropy bonus of 0.001 to the fine-tuning; there is none here. In the loss of the fresh groups it has what
    LUFFY's script has.

    Args:
        finetune_batch: How many prompts are fine-tuned on together, at least 1. 128 in the paper.
    """

    USE = "Use it if the data has worked solutions, and some prompts are never solved."
    SOURCE = "arXiv 2506.07527"
    demonstrates = True
    STATE = ("rng", "waiting")
    METRICS = declare("""
        demonstrations/unsolved | groups | Unsolved groups | | Fresh groups without a reward above 0 whose prompt has \
            a worked solution.
        demonstrations/waiting | prompts | Waiting prompts | | Prompts that wait for fine-tuning after this step.
    """)

    finetune_batch: int = option(128, "at least 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.waiting: dict[str, dict[str, Any]] = {}  # prompts by id, those that have waited longest first

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. A prompt that no response solves begins to wait."""
        unsolved = [group for group in fresh if group.prompt.id in self.solutions and max(group.rewards) <= 0]
        uids = {group.uid for group in unsolved}
        others = [group for group in fresh if group.uid not in uids]
        batch = fill(self.max_responses, others, self.keeps(others))
        batch.demonstration = unsolved
        self.waiting = self.waiting | {group.prompt.id: prompt_state(group.prompt) for group in unsolved}
        if len(self.waiting) >= self.finetune_batch:
            prompt_ids = list(islice(self.waiting, self.finetune_batch))
            batch.fine_tuned = [Prompt(**self.waiting.pop(name)) for name in prompt_ids]
        self.measured = {
            "demonstrations/unsolved": len(unsolved),
            "demonstrations/waiting": len(self.waiting),
        }
        return batch

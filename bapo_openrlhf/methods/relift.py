"""ReLIFT: reinforcement learning, with fine-tuning on demonstrations of what it does not reach, after "Learning What
Reinforcement Learning Can't" (arXiv 2506.07527).

What the paper leaves open follows its authors' code, TheRoadQaQ/ReLIFT at commit eb95454.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.metric import CAPACITY, TRACES, declare
from bapo_openrlhf.adapt.state import group_from_state, group_state
from bapo_openrlhf.adapt.traces import external_response
from bapo_openrlhf.methods.base import FilteredMethod


@dataclass(eq=False, kw_only=True)
class ReLIFT(FilteredMethod):
    """GRPO on fresh groups. A prompt that none of its G responses solves waits for fine-tuning, with its trace.

    Once `finetune_batch` prompts wait, the actor takes one optimizer step on their traces after that step's update. The
    loss is cross-entropy, the mean over all their tokens. Then these prompts leave. A prompt that fails again waits
    again.

    Deviations: the step uses the actor's own optimizer at its learning rate, but the authors keep a second Adam and add
    an entropy bonus. The prompts that have waited longest go first, and a prompt that fails while it waits keeps its
    place. The authors take the latest first, and take a prompt twice. Prompts without a trace do not wait. Fresh groups
    with equal rewards are filtered, unless `--adapt.filter none` is set.

    Args:
        traces: File with the traces.
        finetune_batch: Demonstrations of one fine-tuning step, 128 in the paper.
        finetune_weight: Factor of their loss.

    Raises:
        ValueError: An option is out of its range.
    """

    NAME = "relift"
    METRICS = (
        CAPACITY,
        TRACES,
        *declare("""
            finetune/unsolved | prompts | Unsolved prompts | | Fresh prompts without a reward above 0.
            finetune/waiting | prompts | Waiting prompts | | Prompts that wait for fine-tuning after this step.
            finetune/demonstrations | responses | Demonstrations | | Responses that this step fine-tuned on.
            finetune/loss | nats | Fine-tuning loss | | Mean of -log pi over their tokens, before that.
        """),
    )

    traces: str = ""
    finetune_batch: int = 128
    finetune_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.finetune_batch < 1:
            raise ValueError(f"finetune_batch is {self.finetune_batch}; it must be at least 1")
        if not 0 < self.finetune_weight < np.inf:
            raise ValueError(f"finetune_weight is {self.finetune_weight}; it must be finite and above 0")
        self.waiting: dict[str, Group] = {}  # each trace as a group of its own, by prompt id, the oldest first
        self._due: list[Group] = []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. Unsolved prompts start to wait."""
        unsolved = [group for group in fresh if max(group.rewards) <= 0]
        for group in unsolved:
            trace = self.trace_of.get(group.prompt.text)
            if trace is not None:
                shown = (external_response(trace, group.responses[0], reward=1.0),)
                self.waiting.setdefault(group.prompt.id, replace(group, responses=shown))
        if len(self.waiting) >= self.finetune_batch:
            due = list(islice(self.waiting, self.finetune_batch))
            self._due = [self.waiting.pop(prompt) for prompt in due]
        self.measured = {
            "groups/capacity": self.capacity,
            "traces/prompts": len(self.trace_of),
            "finetune/unsolved": len(unsolved),
            "finetune/waiting": len(self.waiting),
        }
        return fill(self.capacity, fresh, self.passes(fresh))

    def demonstrations(self, step: int) -> Sequence[Group]:
        """The traces of the prompts that have just left, if enough had waited."""
        due, self._due = self._due, []
        return due

    def state_dict(self) -> dict[str, Any]:
        """Generator state and the waiting prompts with their traces. Other traces are read from the file again."""
        return super().state_dict() | {"waiting": [group_state(group) for group in self.waiting.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        super().load_state_dict(state)
        self.waiting = {group.prompt.id: group for group in map(group_from_state, state["waiting"])}

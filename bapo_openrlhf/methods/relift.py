"""ReLIFT: reinforcement learning, and fine-tuning on demonstrations of what it does not reach, after "Learning What
Reinforcement Learning Can't" (arXiv 2506.07527).

What the paper leaves open is as in its authors' code, TheRoadQaQ/ReLIFT at commit eb95454.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fresh_alone
from bapo_openrlhf.adapt.filters import make_filter
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.state import group_from_state, group_state
from bapo_openrlhf.adapt.traces import external_response
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1


class ReLIFT(Method):
    """GRPO on fresh groups; the prompts that none of G responses solves wait, with a trace each, for fine-tuning.

    Once `finetune_batch` of them wait, the actor takes one optimizer step on the traces, after that step's update:
    cross-entropy, the mean over all their tokens. They leave then; a prompt that fails again waits again.

    Deviations: the step is one of the actor's own optimizer at its learning rate; the authors keep a second Adam, and
    add an entropy bonus. The prompts that have waited longest go first, and one
    that fails while it waits keeps its place; the authors take the latest first, and a prompt twice. Prompts without a
    trace do not wait. Fresh groups with equal rewards are filtered, unless `--adapt.filter none`.

    Args:
        capacity: B, groups a batch holds at most.
        seed: of the generator behind the filters that draw.
        filter, gaussian_mean, gaussian_std, uniform_fraction: the fresh filter, as the --adapt flags.
        traces: file with the traces.
        finetune_batch: demonstrations of one fine-tuning step; 128 in the paper.
        finetune_weight: factor of their loss.

    Raises:
        ValueError: an option that is out of its range.
    """

    def __init__(
        self,
        *,
        capacity: int,
        seed: int = 0,
        filter: str = "range",
        gaussian_mean: float = 0.5,
        gaussian_std: float = 0.2,
        uniform_fraction: float = 0.6,
        traces: str = "",
        finetune_batch: int = 128,
        finetune_weight: float = 1.0,
    ) -> None:
        if finetune_batch < 1:
            raise ValueError(f"finetune_batch is {finetune_batch}; it must be at least 1")
        if not 0 < finetune_weight < np.inf:
            raise ValueError(f"finetune_weight is {finetune_weight}; it must be finite and above 0")
        self.capacity = capacity
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.fresh_filter = make_filter(filter, mean=gaussian_mean, std=gaussian_std, fraction=uniform_fraction)
        self.traces, self.finetune_batch, self.finetune_weight = traces, finetune_batch, finetune_weight
        self.waiting: dict[str, Group] = {}  # a trace each, as a group of its own, by prompt id; the oldest first
        self._due: list[Group] = []
        self._metrics: dict[str, float] = {}

    def begin_step(self, step: int) -> list[Prompt]:
        """No prompt is generated again."""
        return []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. Unsolved prompts start to wait."""
        batch = fresh_alone(fresh, self.fresh_filter(fresh, self.rng), self.capacity)

        unsolved = [group for group in fresh if max(group.rewards) <= 0]
        for group in unsolved:
            trace = self.trace_of.get(group.prompt.text)
            if trace is not None:
                shown = (external_response(trace, group.responses[0], reward=1.0),)
                self.waiting.setdefault(group.prompt.id, replace(group, responses=shown))
        if len(self.waiting) >= self.finetune_batch:
            due = list(islice(self.waiting, self.finetune_batch))
            self._due = [self.waiting.pop(prompt) for prompt in due]
        self._metrics = {
            "groups/capacity": self.capacity,
            "traces/prompts": len(self.trace_of),
            "finetune/unsolved": len(unsolved),
            "finetune/waiting": len(self.waiting),
        }
        return batch

    def demonstrations(self, step: int) -> Sequence[Group]:
        """Those that have just left, if enough had waited."""
        due, self._due = self._due, []
        return due

    def metrics(self) -> dict[str, float]:
        """After the last batch.

        - groups/capacity: groups that a batch holds at most
        - traces/prompts: prompts that have a trace
        - finetune/unsolved: fresh groups of this step without a reward above 0
        - finetune/waiting: prompts that wait after this step
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Generator state and the waiting prompts with their traces; other traces are read anew."""
        return {
            "method": "relift",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "waiting": [group_state(group) for group in self.waiting.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "relift", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.waiting = {group.prompt.id: group for group in map(group_from_state, state["waiting"])}

"""ARPO: where all responses of a prompt fail, one of them gives way to a stored success (arXiv 2505.16282).

Paper: "ARPO: End-to-End Policy Optimization for GUI Agents with Experience Replay". Details are those of its authors'
code (dvlab-research/ARPO, verl/trainer, read at commit 7489ae3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fresh_alone
from bapo_openrlhf.adapt.buffers import ResponseCache
from bapo_openrlhf.adapt.filters import make_filter
from bapo_openrlhf.adapt.group import Group, Prompt, as_fraction
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1


class ARPO(Method):
    """Keeps each prompt's last successes, and puts one into a fresh group of that prompt that failed as a whole.

    A group has failed where the mean of its rewards is below `mean_below` and their standard deviation below
    `std_below`. One success is drawn uniformly from those stored of its prompt in earlier steps, where there are any,
    and takes the place of the group's first response, as in the authors' code: which one gives way makes no difference,
    for they are draws of one policy and all failed alike. The stored one keeps the log-probs and the `policy_step` of
    the policy that generated it. Then the fresh filter sees the group, so it is trained on. Nothing is replayed as a
    group of its own, or generated again.

    Deviations: fresh groups with equal rewards, also those that found no stored success, are filtered; the authors
    train on them with advantages of 0 (`--adapt.filter none` does). The thresholds are exact numbers. What the paper
    has for agents (screenshots, tasks in an environment) is not of this layer: a task is a prompt here.

    The cache holds successes of every prompt of the data; `cache/bytes` in the log says how much that is.

    Args:
        capacity: B, groups a batch holds at most.
        seed: of the generator behind the draws.
        filter, gaussian_mean, gaussian_std, uniform_fraction: the fresh filter, as the --adapt flags.
        successes: most stored of a prompt, at least 1; the oldest leave.
        success_above: a response is stored as a success where its reward is above this.
        std_below, mean_below: a group has failed where both its numbers are below these.

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
        successes: int = 8,
        success_above: Fraction = Fraction(1, 10),
        std_below: Fraction = Fraction(1, 20),
        mean_below: Fraction = Fraction(1, 5),
    ) -> None:
        if successes < 1:
            raise ValueError(f"successes is {successes}; it must be at least 1")
        self.std_below = as_fraction(std_below)
        if self.std_below <= 0:
            raise ValueError(f"std_below is {std_below}; it must be above 0")
        self.capacity = capacity
        self.success_above, self.mean_below = as_fraction(success_above), as_fraction(mean_below)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.fresh_filter = make_filter(filter, mean=gaussian_mean, std=gaussian_std, fraction=uniform_fraction)
        self.cache = ResponseCache(successes)
        self._metrics: dict[str, float] = {}

    def begin_step(self, step: int) -> list[Prompt]:
        """No prompt is generated again."""
        return []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1 alone: fresh groups, some with a stored success in them, that the filter keeps."""
        helped = [self._helped(group) for group in fresh]
        batch = fresh_alone(helped, self.fresh_filter(helped, self.rng), self.capacity)

        for group in fresh:  # last, and as generated: what is stored is from earlier steps, each response once
            right = tuple(
                response
                for response, reward in zip(group.responses, group.rewards, strict=True)
                if reward > self.success_above
            )
            if right:
                self.cache.add(replace(group, responses=right))
        exchanged = [new for new, old in zip(helped, fresh, strict=True) if new is not old]
        ages = [step - group.policy_step_of(group.responses[0]) for group in exchanged]
        self._metrics = {
            "groups/capacity": self.capacity,
            "exchange/failed": sum(map(self.has_failed, fresh)),
            "exchange/groups": len(ages),
            "cache/prompts": len(self.cache),
            "cache/responses": self.cache.responses,
            "cache/bytes": self.cache.nbytes,
            "cache/added": self.cache.counts["added"],
            "cache/evicted": self.cache.counts["evicted"],
        }
        if ages:
            self._metrics["exchange/age_mean"] = float(np.mean(ages))
        return batch

    def has_failed(self, group: Group) -> bool:
        """Whether a group is without success: low rewards that hardly differ."""
        return group.mean < self.mean_below and group.variance < self.std_below**2

    def _helped(self, group: Group) -> Group:
        """The group, with a stored success in the place of its first response where it has failed."""
        if not self.has_failed(group):
            return group
        stored = [past.standalone(response) for past in self.cache.groups(group.prompt) for response in past.responses]
        return group.exchange(0, stored[self.rng.integers(len(stored))]) if stored else group

    def metrics(self) -> dict[str, float]:
        """After the last batch.

        - groups/capacity: groups that a batch holds at most
        - exchange/failed: fresh groups that failed as a whole
        - exchange/groups: of these, with a stored success in them now, also where the filter dropped them
        - exchange/age_mean: trainer steps between the weights that generated these successes and today's, mean; where
          there is one
        - cache/prompts, cache/responses, cache/bytes: successes held now; bytes of tokens and sampled log-probs
        - cache/added, cache/evicted: successes, over the whole run
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Cache and generator state."""
        return {
            "method": "arpo",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "cache": self.cache.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. With fewer `successes` than before, the oldest leave.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "arpo", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.cache.load_state_dict(state["cache"])

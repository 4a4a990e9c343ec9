"""ARPO: if all responses of a prompt fail, one of them gives way to a stored success (arXiv 2505.16282).

Paper: "ARPO: End-to-End Policy Optimization for GUI Agents with Experience Replay". Details follow its authors' code
(dvlab-research/ARPO, verl/trainer, read at commit 7489ae3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import ResponseCache
from bapo_openrlhf.adapt.group import Group, as_fraction
from bapo_openrlhf.adapt.metric import CAPACITY, EXCHANGE_AGE, declare
from bapo_openrlhf.methods.base import FilteredMethod


@dataclass(eq=False, kw_only=True)
class ARPO(FilteredMethod):
    """Keeps the last successes of each prompt, and puts one into a fresh group of that prompt that failed as a whole.

    A group has failed if the mean of its rewards is below `mean_below` and their standard deviation is below
    `std_below`. If earlier steps stored successes of its prompt, one of them is drawn uniformly and replaces the first
    response of the group, as in the authors' code. It makes no difference which response gives way, because all are
    draws of one policy and all failed alike. The stored response keeps the log-probs and the `policy_step` of the
    policy that generated it. The fresh filter then sees the group, so it is trained on. Nothing is replayed as a group
    of its own, and no prompt is generated again.

    Deviations: fresh groups with equal rewards are filtered, also those without a stored success. The authors train on
    them with advantages of 0 (`--adapt.filter none` does so). The thresholds are exact numbers. This layer has nothing
    that is specific to agents (screenshots, tasks in an environment): a task is a prompt here.

    The cache holds successes of every prompt of the data. The metric `cache/bytes` says how much that is.

    Args:
        successes: Most successes stored of a prompt, at least 1. Beyond them, the oldest leave.
        success_above: A response is stored as a success if its reward is above this number.
        std_below, mean_below: A group has failed if both its numbers are below these.

    Raises:
        ValueError: An option is out of its range.
    """

    NAME = "arpo"
    SENTENCE = "Puts a stored success into a group whose responses all failed."
    USE = "Use it if rewards are rare, so that most groups fail as a whole."
    SOURCE = "arXiv 2505.16282"
    STATE = ("rng", "cache")
    METRICS = (
        CAPACITY,
        *ResponseCache.METRICS,
        *declare("""
            exchange/failed | groups | Failed groups | | Fresh groups whose responses all failed.
            exchange/groups | groups | Exchanged groups | | Failed groups that got a stored success.
        """),
        EXCHANGE_AGE,
    )

    successes: int = 8
    success_above: Fraction = Fraction(1, 10)
    std_below: Fraction = Fraction(1, 20)
    mean_below: Fraction = Fraction(1, 5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.successes < 1:
            raise ValueError(f"successes is {self.successes}; it must be at least 1")
        self.success_above, self.mean_below = as_fraction(self.success_above), as_fraction(self.mean_below)
        self.std_below = as_fraction(self.std_below)
        if self.std_below <= 0:
            raise ValueError(f"std_below is {self.std_below}; it must be above 0")
        self.cache = ResponseCache(self.successes)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """Only X1: fresh groups that the filter keeps. Some of them have a stored success in them."""
        helped = [self._helped(group) for group in fresh]
        batch = fill(self.room, helped, self.passes(helped))

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
        self.measured = {
            "groups/capacity": self.capacity,
            "exchange/failed": sum(map(self.has_failed, fresh)),
            "exchange/groups": len(ages),
            **self.cache.metrics(),
            **({"exchange/age_mean": float(np.mean(ages))} if ages else {}),
        }
        return batch

    def has_failed(self, group: Group) -> bool:
        """Whether a group is without success: its rewards are low and hardly differ."""
        return group.mean < self.mean_below and group.variance < self.std_below**2

    def _helped(self, group: Group) -> Group:
        """The group. If it has failed, a stored success is in the place of its first response."""
        if not self.has_failed(group):
            return group
        stored = [past.standalone(response) for past in self.cache.groups(group.prompt) for response in past.responses]
        return group.exchange(0, stored[self.rng.integers(len(stored))]) if stored else group

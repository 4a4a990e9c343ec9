"""What ARPO and AR3PO share: the last successes of each prompt, one of which helps a group that failed."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import compress

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import ResponseCache
from bapo_openrlhf.adapt.group import Group, Response
from bapo_openrlhf.adapt.metric import EXCHANGE_AGE, declare
from bapo_openrlhf.methods.base import FilteredMethod, option


@dataclass(eq=False, kw_only=True)
class StoredSuccesses(FilteredMethod):
    """Keeps the last successes of each prompt, and helps a fresh group that failed as a whole by one of them.

    If earlier steps stored successes of its prompt, one of them is drawn uniformly. The fresh filter then sees the
    helped group, so it is trained on. Nothing is replayed as a group of its own, and no prompt is generated again. The
    cache holds successes of every prompt of the data. The metric `cache/bytes` says how much that is.

    Args:
        successes: Most successes stored of a prompt, at least 1. Beyond them, the oldest leave.
        success_above: A response is stored as a success if its reward is above this number, in [0, 1).
    """

    STATE = ("rng", "cache")
    adds_rewards = True
    METRICS = (
        *ResponseCache.METRICS,
        *declare("""
            exchange/failed | groups | Failed groups | | Fresh groups whose responses all failed.
            exchange/groups | groups | Exchanged groups | | Failed groups that got a stored success.
        """),
        EXCHANGE_AGE,
    )

    successes: int = option(8, "at least 1")
    success_above: Fraction = option(Fraction(1, 10), "in [0, 1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cache = ResponseCache(self.successes)

    @abstractmethod
    def has_failed(self, group: Group) -> bool:
        """Whether a group is without success."""

    def help(self, group: Group, stored: Response) -> Group:
        """A failed group whose first response gives way to a stored success, with its log-probs and `weights_version`.

        Which response gives way makes no difference, because all are draws of one policy and all failed alike.
        """
        return group.exchange(0, stored)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """Only X1: fresh groups that the filter keeps. Some of them got a stored success."""
        groups, ages, failed = [], [], [self.has_failed(group) for group in fresh]
        for group, has_failed in zip(fresh, failed, strict=True):
            stored = self.cache.groups(group.prompt) if has_failed else []
            successes = [past.standalone(response) for past in stored for response in past.responses]
            if successes:
                success = successes[self.rng.integers(len(successes))]
                ages.append(step - group.weights_version_of(success))
                group = self.help(group, success)
            groups.append(group)
        batch = fill(self.max_responses, groups, self.keeps(groups))

        for group in fresh:  # last, and as generated: what is stored is from earlier steps, each response once
            responses = tuple(compress(group.responses, (reward > self.success_above for reward in group.rewards)))
            if responses:
                self.cache.add(replace(group, responses=responses))
        self.measured = {
            "exchange/failed": sum(failed),
            "exchange/groups": len(ages),
            **self.cache.metrics(),
            **({"exchange/age_mean": float(np.mean(ages))} if ages else {}),
        }
        return batch

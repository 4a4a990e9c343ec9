"""A training batch as the union of the three sources X1, X2 and X3 (Definition 3.1), and how it is made to fit."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from bapo_openrlhf.adapt.group import Group

Source = Literal["fresh", "reevaluated", "replayed"]


@dataclass
class Batch:
    """The groups that one trainer step updates the policy with, and what became of the others that it generated.

    Attributes:
        fresh: X1, filtered fresh groups.
        reevaluated: X2, once too hard, informative under today's policy.
        replayed: X3, informative groups of the last few steps.
        filtered: fresh groups that the filter dropped.
        unimproved: groups generated again that are still too hard.
        solved: groups generated again that have nothing left to learn from.
        cut: groups that were selected for X1 or X2 but did not fit (capacity, or the data-parallel ranks).
        too_far: groups selected for X1 whose policy is further from today's than allowed (Eq. 9).
        nonfinite: groups selected for X1 or X2 whose importance ratio today is no finite number.
        unused: groups drawn for X3 and then left out, for one of the last three reasons. They are not of this step.
    """

    fresh: list[Group] = field(default_factory=list)
    reevaluated: list[Group] = field(default_factory=list)
    replayed: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    unimproved: list[Group] = field(default_factory=list)
    solved: list[Group] = field(default_factory=list)
    cut: list[Group] = field(default_factory=list)
    too_far: list[Group] = field(default_factory=list)
    nonfinite: list[Group] = field(default_factory=list)
    unused: list[Group] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.fresh) + len(self.reevaluated) + len(self.replayed)

    def with_sources(self) -> list[tuple[Source, Group]]:
        """All groups with their source, X1 first, then X2, then X3."""
        return (
            [("fresh", group) for group in self.fresh]
            + [("reevaluated", group) for group in self.reevaluated]
            + [("replayed", group) for group in self.replayed]
        )


def cut_to(size: int, fresh: list[Group], reevaluated: list[Group]) -> Batch:
    """X1 and X2 with at most `size` groups: those with the highest reward variance stay (Prop. A.3).

    Ties go to the group whose policy is the more recent, then to the one generated last; a stored response in a group
    does not make it older. Order within a source is kept.
    """
    if len(fresh) + len(reevaluated) <= size:
        return Batch(fresh=list(fresh), reevaluated=list(reevaluated))
    ranked = sorted(fresh + reevaluated, key=lambda g: (g.variance, g.policy_step, g.uid), reverse=True)
    kept = {group.uid for group in ranked[:size]}
    return Batch(
        fresh=[group for group in fresh if group.uid in kept],
        reevaluated=[group for group in reevaluated if group.uid in kept],
        cut=[group for group in fresh + reevaluated if group.uid not in kept],
    )


def fresh_alone(groups: Sequence[Group], keep: Sequence[bool], capacity: int, quantum: int) -> Batch:
    """X1 alone: of the kept groups as many whole quanta as fit (see `cut_to`); the others are filtered.

    Args:
        groups: the fresh groups of the step.
        keep: for each of them, whether it may be trained on.
        capacity: B, groups a batch holds at most.
        quantum: a batch holds a multiple of this many groups.
    """
    x1 = [group for group, kept in zip(groups, keep, strict=True) if kept]
    size = min(len(x1), capacity)
    batch = cut_to(size - size % quantum, x1, [])
    batch.filtered = [group for group, kept in zip(groups, keep, strict=True) if not kept]
    return batch


def replay_room(capacity: int, selected: int, available: int, quantum: int) -> int:
    """How many groups X3 adds to |X1| + |X2| = `selected`: min(|B_high|, B - |X1| - |X2|) of Eq. 7, made to fit.

    A batch must hold a multiple of `quantum` groups, or the data-parallel ranks would get unequal shares. So X3 takes a
    few less than Eq. 7 allows where that makes the union a multiple; never more.
    """
    total = selected + max(min(available, capacity - selected), 0)
    return max(total - total % quantum - selected, 0)


def drop(
    batch: Batch, *, too_far: Set[int] = frozenset(), nonfinite: Set[int] = frozenset(), quantum: int = 1
) -> Batch:
    """The batch without groups that turned out to be unfit once their log-probs were known; again whole quanta.

    What is then left over beyond a multiple of `quantum` leaves too: replayed groups first, the oldest first, for they
    have been trained on before; then those of least variance.

    Args:
        too_far, nonfinite: uids; one that is in both counts as nonfinite.
    """
    unfit = too_far | nonfinite
    x1, x2, x3 = (
        [group for group in source if group.uid not in unfit]
        for source in (batch.fresh, batch.reevaluated, batch.replayed)
    )
    surplus = (len(x1) + len(x2) + len(x3)) % quantum
    oldest = {group.uid for group in sorted(x3, key=lambda g: (g.policy_step, g.uid))[:surplus]}
    x3 = [group for group in x3 if group.uid not in oldest]
    fitted = cut_to(len(x1) + len(x2) - (surplus - len(oldest)), x1, x2)
    selected = batch.fresh + batch.reevaluated
    kept = {group.uid for group in x3}
    return replace(
        batch,
        fresh=fitted.fresh,
        reevaluated=fitted.reevaluated,
        replayed=x3,
        cut=batch.cut + fitted.cut,
        too_far=batch.too_far + [g for g in selected if g.uid in too_far and g.uid not in nonfinite],
        nonfinite=batch.nonfinite + [g for g in selected if g.uid in nonfinite],
        unused=batch.unused + [g for g in batch.replayed if g.uid not in kept],
    )

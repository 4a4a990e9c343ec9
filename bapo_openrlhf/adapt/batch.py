"""A training batch as the union of the three sources X1, X2 and X3 (Definition 3.1), and how it is made to fit."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.vocabulary import Source


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
        cut: groups that were selected for X1 or X2 but did not fit, because the batch is full.
        too_far: groups selected for X1 whose policy is further from today's than allowed (Eq. 9).
        nonfinite: groups selected for X1 or X2 whose importance ratio today is no finite number.
        unused: groups drawn for X3 and then left out, for one of the last two reasons. They are not of this step.
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


def fresh_alone(groups: Sequence[Group], keep: Sequence[bool], capacity: int) -> Batch:
    """X1 only: of the kept groups as many as fit (see `cut_to`); the others are filtered.

    Args:
        groups: the fresh groups of the step.
        keep: for each of them, whether it may be trained on.
        capacity: most groups of X1.
    """
    batch = cut_to(capacity, [group for group, kept in zip(groups, keep, strict=True) if kept], [])
    batch.filtered = [group for group, kept in zip(groups, keep, strict=True) if not kept]
    return batch


def replay_room(capacity: int, selected: int, available: int) -> int:
    """How many groups X3 adds to |X1| + |X2| = `selected`: min(|B_high|, B - |X1| - |X2|), at least 0 (Eq. 7)."""
    return max(min(available, capacity - selected), 0)


def drop(batch: Batch, *, too_far: Set[int] = frozenset(), nonfinite: Set[int] = frozenset()) -> Batch:
    """The batch without groups that turned out to be unfit once their log-probs were known.

    Args:
        too_far, nonfinite: uids; one that is in both counts as nonfinite.
    """
    far, unfit = too_far - nonfinite, too_far | nonfinite
    selected = batch.fresh + batch.reevaluated
    return replace(
        batch,
        fresh=[group for group in batch.fresh if group.uid not in unfit],
        reevaluated=[group for group in batch.reevaluated if group.uid not in unfit],
        replayed=[group for group in batch.replayed if group.uid not in unfit],
        too_far=batch.too_far + [group for group in selected if group.uid in far],
        nonfinite=batch.nonfinite + [group for group in selected if group.uid in nonfinite],
        unused=batch.unused + [group for group in batch.replayed if group.uid in unfit],
    )

"""A training batch: the union of the sources X1, X2 and X3 (Definition 3.1), and how it fits into its capacity."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Self

from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.vocabulary import SOURCES, Source


@dataclass(frozen=True)
class Demonstration:
    """A worked solution of a prompt that a step trains on: a member of X4.

    No policy of this run wrote it, so its tokens have no behaviour log-probs: it is in no ratio, no distance and no
    bound, and it is not a `Response`. Its tokens are not here: the trainer finds them by the prompt. `uid` is that of
    the group that it is shown for. Its advantage is relative to `rewards` (Eq. 2), of which the last one is its own.
    """

    uid: int
    prompt: Prompt
    rewards: tuple[float, ...]

    @classmethod
    def of(cls, group: Group) -> Self:
        """The worked solution of a group's prompt, which has the greatest reward of the task."""
        rewards = [response.reward for response in group.responses]
        return cls(group.uid, group.prompt, (*rewards, float(group.reward_range[1])))


@dataclass
class Batch:
    """The groups that one trainer step updates the policy with, and what became of the others that it generated.

    Attributes:
        fresh: X1, fresh groups that passed the filter.
        reevaluated: X2, groups of prompts that were too hard before and are informative under today's policy.
        replayed: X3, informative groups of the last few steps.
        prefixed: Groups with a signal whose responses all begin with one prefix.
        filtered: Fresh groups that the filter dropped.
        unimproved: Groups generated again that are still too hard.
        solved: Groups generated again that have nothing left to learn from.
        unsteered: Groups with a prefix and without a signal.
        demonstration: Groups that are not trained on, because the worked solution of their prompt is, now or later.
        cut: Groups that were selected for X1 or X2, or have a prefix, but did not fit, because the batch is full.
        too_far: Groups selected for X1 on which the shift of today's policy is larger than allowed.
        nonfinite: Such groups whose importance ratio today is not a finite number.
        unused: Groups of earlier steps that were drawn for X3 and left out for one of the last two reasons.
        demonstrations: X4, worked solutions that the update trains on together with X1, X2 and X3.
        fine_tuned: Prompts on whose worked solutions the actor is fine-tuned after the update.
    """

    fresh: list[Group] = field(default_factory=list)
    reevaluated: list[Group] = field(default_factory=list)
    replayed: list[Group] = field(default_factory=list)
    prefixed: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    unimproved: list[Group] = field(default_factory=list)
    solved: list[Group] = field(default_factory=list)
    unsteered: list[Group] = field(default_factory=list)
    demonstration: list[Group] = field(default_factory=list)
    cut: list[Group] = field(default_factory=list)
    too_far: list[Group] = field(default_factory=list)
    nonfinite: list[Group] = field(default_factory=list)
    unused: list[Group] = field(default_factory=list)
    demonstrations: list[Demonstration] = field(default_factory=list)
    fine_tuned: list[Prompt] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.with_sources())

    @property
    def responses(self) -> int:
        """Number of responses that it trains on: its size, without X4."""
        return sum(group.size for _, group in self.with_sources())

    @property
    def samples(self) -> int:
        """Number of responses and worked solutions that the update trains on."""
        return self.responses + len(self.demonstrations)

    @property
    def silent(self) -> list[Group]:
        """The filtered groups without a signal: their group-relative advantages are 0."""
        return [group for group in self.filtered if not has_signal(group)]

    def with_sources(self) -> list[tuple[Source, Group]]:
        """All groups with their source: X1 first, then X2, X3 and those with a prefix."""
        return [(source, group) for source in SOURCES for group in getattr(self, source)]


def fill(
    capacity: int,
    fresh: Sequence[Group],
    keep: Sequence[bool],
    reevaluated: Sequence[Group] = (),
    *,
    prefixed: Sequence[Group] = (),
    most_fresh: int | None = None,
    replay: Callable[[int], list[Group]] | None = None,
) -> Batch:
    """A batch of at most `capacity` responses: X1, X2 and groups with a prefix, and X3 in the room they leave (Eq. 7).

    If those do not fit, the groups with the highest reward variance stay (`highest_variance`). The others are cut.

    Args:
        capacity: Responses that the batch holds at most: B x G.
        keep: Says of each fresh group whether it belongs to X1. The others are filtered.
        reevaluated: X2.
        prefixed: Groups with a prefix that are worth training on.
        most_fresh: Responses of X1 at most, to reserve places for X2 or X3. None means no limit but the capacity.
        replay: Draws X3: stored groups with at most as many responses as it is given, which still fit.
    """
    filtered = [group for group, passes in zip(fresh, keep, strict=True) if not passes]
    x1 = list(compress(fresh, keep))
    within_limit = highest_variance(x1, capacity if most_fresh is None else most_fresh)
    other_groups = [*reevaluated, *prefixed]
    uids = {group.uid for group in highest_variance([*within_limit, *other_groups], capacity)}
    batch = Batch(
        fresh=[group for group in x1 if group.uid in uids],
        reevaluated=[group for group in reevaluated if group.uid in uids],
        prefixed=[group for group in prefixed if group.uid in uids],
        filtered=filtered,
        cut=[group for group in (*x1, *other_groups) if group.uid not in uids],
    )
    if replay:
        batch.replayed = replay(capacity - batch.responses)
    return batch


def fitting(groups: Iterable[Group], free: int) -> list[Group]:
    """The groups that fit into `free` responses, in their order. A group that does not fit any more is left out."""
    result = []
    for group in groups:
        if group.size <= free:
            result.append(group)
            free -= group.size
    return result


def highest_variance(groups: Sequence[Group], free: int) -> list[Group]:
    """The groups with the highest reward variance (Prop. A.3) that fit into `free` responses, in the order they came.

    Of equal variances, the newer policy stays, then the newer group. A stored response does not make a group older.
    """
    if sum(group.size for group in groups) <= free:
        return list(groups)
    ranked = sorted(groups, key=lambda group: (group.variance, group.weights_version, group.uid), reverse=True)
    uids = {group.uid for group in fitting(ranked, free)}
    return [group for group in groups if group.uid in uids]


def without_silent(batch: Batch) -> Batch:
    """The batch with all fresh groups without a signal among the filtered ones, also those that the filter kept."""
    return replace(
        batch,
        fresh=[group for group in batch.fresh if has_signal(group)],
        filtered=batch.filtered + [group for group in batch.fresh if not has_signal(group)],
    )


@dataclass(frozen=True)
class Skipped:
    """A sample of a silent group. It counts where a batch is divided, and no model passes it.

    `place` is its position in the batch, `total_length` counts all its tokens, and `tokens` the generated ones.
    """

    place: int
    total_length: int
    tokens: int


def skipped(batch: Batch) -> list[Skipped]:
    """The samples of the silent groups, which stand among those of X1, in the order of generation."""
    silent = {group.uid for group in batch.silent}
    members = sorted([*batch.fresh, *batch.silent], key=lambda group: group.uid)
    samples = [(group.uid in silent, response) for group in members for response in group.responses]
    return [
        Skipped(place, len(response.token_ids), len(response.log_probs))
        for place, (is_silent, response) in enumerate(samples)
        if is_silent
    ]


def drop(batch: Batch, *, too_far: Set[int] = frozenset(), nonfinite: Set[int] = frozenset()) -> Batch:
    """The batch without groups that turned out to be unfit once their log-probs were known, and what is shown for them.

    `too_far` and `nonfinite` are uids. A group that is in both sets counts as nonfinite.
    """
    dropped, only_too_far = too_far | nonfinite, too_far - nonfinite
    groups = batch.fresh + batch.reevaluated + batch.prefixed
    return replace(
        batch,
        fresh=[group for group in batch.fresh if group.uid not in dropped],
        reevaluated=[group for group in batch.reevaluated if group.uid not in dropped],
        replayed=[group for group in batch.replayed if group.uid not in dropped],
        prefixed=[group for group in batch.prefixed if group.uid not in dropped],
        too_far=batch.too_far + [group for group in groups if group.uid in only_too_far],
        nonfinite=batch.nonfinite + [group for group in groups if group.uid in nonfinite],
        unused=batch.unused + [group for group in batch.replayed if group.uid in dropped],
        demonstrations=[demonstration for demonstration in batch.demonstrations if demonstration.uid not in dropped],
    )

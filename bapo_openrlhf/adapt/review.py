"""The review of a batch: which of its groups are not trained on once their log-probs under today's policy are known."""

from dataclasses import dataclass

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, drop
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.shift import Gap, TokenSums, group_shifts, on_policy, shift
from bapo_openrlhf.adapt.theory import sampled_tv
from bapo_openrlhf.adapt.vocabulary import SOURCES


@dataclass(frozen=True)
class Review:
    """The result of a review. From `gap` on, groups with a log ratio that is not finite do not count.

    Attributes:
        kept: Positions of the responses that stay, among those of the batch before the review.
        nonfinite: Number of groups that left because a log ratio of theirs is not finite.
        rollout_shift: Shift of today's policy on the fresh groups. It is 0 if there are none.
        shifts, distances: Shift and sampled TV distance of each group to today's policy, also if it is too far.
    """

    batch: Batch
    kept: list[int]
    nonfinite: int
    gap: Gap
    rollout_shift: float
    shifts: dict[Group, float]
    distances: dict[Group, float]


def review(
    batch: Batch,
    log_ratios: np.ndarray,
    sums: TokenSums,
    step: int,
    gap: Gap,
    *,
    since: int,
    max_shift_fresh: float | None = None,
    max_shift_replayed: float | None = None,
) -> Review:
    """Find the groups whose log ratios are not finite and those that are too far from today's policy.

    Each response of a group counts with its own policy. The shift and the distance of one that today's policy generated
    are 0, because its log ratio is only the difference in rounding between the rollout engine and the actor.

    Args:
        log_ratios: Log ratios of all responses, shape (N,), in the order of `Batch.with_sources`, as `sums`.
        gap: The gap of engine and actor that was measured last.
        since: First trainer step with today's weights.
        max_shift_fresh, max_shift_replayed: Largest shift, in the place of delta_1 and delta_3 (Eq. 9, 10), if any.
    """
    groups = [group for _, group in batch.with_sources()]
    if not groups:
        return Review(batch, kept=[], nonfinite=0, gap=gap, rollout_shift=0.0, shifts={}, distances={})
    sizes = [group.size for group in groups]
    uids = np.repeat([group.uid for group in groups], sizes)
    is_finite = ~np.isin(uids, uids[~np.isfinite(log_ratios)])
    nonfinite_uids = set(uids[~is_finite].tolist())
    from_current = on_policy(groups, since)
    gap = gap.measured(step, log_ratios[from_current & is_finite], sums.at(from_current & is_finite))
    of_groups = np.split(np.where(from_current, 0.0, log_ratios), np.cumsum(sizes)[:-1])
    distances = {
        group: sampled_tv(group_log_ratios)
        for group, group_log_ratios in zip(groups, of_groups, strict=True)
        if group.uid not in nonfinite_uids
    }
    shifts: dict[Group, float] = {}
    rollout_shift = 0.0
    for source in SOURCES:
        members = [group for group in getattr(batch, source) if group.uid not in nonfinite_uids]
        rows = np.isin(uids, [group.uid for group in members])
        source_shifts = group_shifts(sums.at(rows), from_current[rows], [group.size for group in members], gap)
        shifts |= dict(zip(members, source_shifts.tolist(), strict=True))
        if source == "fresh":
            rollout_shift = shift(sums.at(rows), from_current[rows], gap)
    limits = [(batch.fresh, max_shift_fresh), (batch.replayed, max_shift_replayed)]
    too_far = {
        group.uid
        for members, limit in limits
        for group in members
        if limit is not None and group in shifts and shifts[group] > limit
    }
    kept = [position for position, uid in enumerate(uids.tolist()) if uid not in too_far | nonfinite_uids]
    reviewed = drop(batch, too_far=too_far, nonfinite=nonfinite_uids)
    return Review(reviewed, kept, len(nonfinite_uids), gap, rollout_shift, shifts, distances)

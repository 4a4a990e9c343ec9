"""The review of a batch: which of its groups are not trained on once their log-probs under today's policy are known."""

from dataclasses import dataclass

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, drop
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.staleness import beyond, group_tv, nonfinite


@dataclass(frozen=True)
class Review:
    """The result of a review.

    Attributes:
        batch: The batch without the groups that must not be trained on.
        kept: Positions of the samples that stay, among the samples of the batch before the review.
        nonfinite: Number of groups that left because a log ratio of theirs is not finite.
        rollout_tv: Mean sampled TV distance between the policies that generated the fresh groups and today's policy.
            Groups with a log ratio that is not finite do not count. It is 0 if no group counts.
        distances: Sampled TV distance of each group with finite log ratios to today's policy, also if it is too far.
    """

    batch: Batch
    kept: list[int]
    nonfinite: int
    rollout_tv: float
    distances: dict[Group, float]


def review(
    batch: Batch,
    log_ratios: np.ndarray,
    step: int,
    *,
    max_tv_fresh: float | None = None,
    max_tv_replayed: float | None = None,
) -> Review:
    """Find the groups whose log ratios are not finite and those that are too far from today's policy.

    A fresh group may have responses of several policies. The distance of each response is that to its own policy.
    The distance of a response that today's policy generated is 0, because its log ratio is only the difference in
    rounding between the rollout engine and the actor.

    Args:
        batch: The batch of this step.
        log_ratios: Log ratios of all responses, shape (N,), in the order of `Batch.with_sources`.
        step: Trainer step.
        max_tv_fresh: Largest TV distance of a fresh group, delta_1 of Eq. 9; None for no limit.
        max_tv_replayed: Largest TV distance of a replayed group, delta_3 of Eq. 10; None for no limit.
    """
    groups = [group for _, group in batch.with_sources()]
    if not groups:
        return Review(batch, [], 0, 0.0, {})
    sizes = [group.size for group in groups]
    broken = {group.uid for group, bad in zip(groups, nonfinite(log_ratios, sizes), strict=True) if bad}
    today = [group.policy_step_of(response) == step for group in groups for response in group.responses]
    tv = group_tv(np.where(today, 0.0, log_ratios), sizes).tolist()
    distances = dict(zip(groups, tv, strict=True))
    too_far = beyond({group.uid: distances[group] for group in batch.fresh}, max_tv_fresh)
    too_far |= beyond({group.uid: distances[group] for group in batch.replayed}, max_tv_replayed)
    finite = {group: distance for group, distance in distances.items() if group.uid not in broken}
    fresh = [finite[group] for group in batch.fresh if group in finite]
    rollout_tv = float(np.mean(fresh)) if fresh else 0.0
    uids = np.repeat([group.uid for group in groups], sizes).tolist()
    kept = [position for position, uid in enumerate(uids) if uid not in too_far | broken]
    return Review(drop(batch, too_far=too_far, nonfinite=broken), kept, len(broken), rollout_tv, finite)

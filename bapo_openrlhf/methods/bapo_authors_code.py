"""The batches of the BAPO authors' public code, which follows other rules than their paper (waunx/BAPO_ICLR, 426b509).

Read at this commit: `recipe/bapo`, the store in `verl/trainer/ppo/ray_trainer.py`, and the script for Qwen3-8B.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import compress
from typing import ClassVar

from bapo_openrlhf.adapt.batch import Batch, fitting
from bapo_openrlhf.adapt.buffers import HardBuffer, ReplayBuffer
from bapo_openrlhf.adapt.group import Group, Prompt, mean_reward
from bapo_openrlhf.adapt.metric import ATTEMPTS
from bapo_openrlhf.adapt.rewards import exact_mean
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.adapt.thresholds import AdaptiveThresholds, Interval
from bapo_openrlhf.methods.base import FilteredMethod

MOST_GOOD = 8  # groups between c2 and c3 that a full store keeps
LAST = 4  # re-evaluations whose mean counts: the last 32 rewards of groups of 8
LEAST_STORED = 5  # groups that the store must hold before the thresholds move


@dataclass(eq=False, kw_only=True)
class AuthorsCode(FilteredMethod):
    """BAPO with the rules of its authors' public code where they are not those of the paper.

    The differences to the paper are these. One store holds the hard groups (mean <= c1) and the good ones (c2 <= mean
    <= c3). A re-evaluated group is trained on if its mean is above that of the stored group of its prompt. The stored
    group stays. Whether it is replayed depends on the mean of its last four re-evaluations, if there are any, but it is
    replayed with the responses that it was stored with. Age has no limit: their 3 steps only say which groups leave
    first, and the oldest do so anyway. If the store is full, at most 8 good groups stay. X3 is drawn from all good
    groups. Then those whose re-evaluation is in X2 are left out, and no others take their place, so their room in the
    batch stays empty. If no fresh group passes the filter, all are in X1. X1 that is too large is cut at its end. X2
    that is too large is cut to random responses, which breaks groups.

    Not here: their gaussian and uniform filters (those of the paper are), prompts left out so that GPUs have equal
    numbers, and the old log-probs of X3, which they compute with the actor of the step that generated it. With
    `--adapt.ratio decoupled`, X1 and X2 are as in their code, and X3 is clipped around today's actor. They give a
    single response of a group its reward as advantage; here it has 0. If a prompt is stored twice, they may re-evaluate
    it for both groups; here it is for the newer one.

    Args:
        replay_steps: 0 turns X3 off. Any other number has no effect.
        buffer_size: Most groups stored, above 8.
        moving: Whether c2 and c3 move. They are at the high ends of their intervals if the mean reward of the store is
            at most 0.2, at the low ends if it is at least 0.8, and move linearly between. If they do not move, they
            stay at the low ends.
    """

    USE = "Use it to compare with runs of that code."
    SOURCE = "waunx/BAPO_ICLR at 426b509"
    STATE = ("rng", "replay", "again", "thresholds")
    METRICS = (ATTEMPTS, HardBuffer.METRICS[0], *ReplayBuffer.METRICS, *AdaptiveThresholds.METRICS)
    asynchronous: ClassVar[bool] = False

    c1: Fraction = Fraction(1, 8)
    c2: Interval = Interval(Fraction(1, 8), Fraction(3, 8))
    c3: Interval = Interval(Fraction(3, 8), Fraction(6, 8))
    buffer_size: int = 256
    replay_steps: int = 3
    reevaluate_every: int = 1
    max_reevaluated_prompts: int = 256
    moving: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer_size <= MOST_GOOD:
            raise ValueError(f"buffer_size is {self.buffer_size}; it must be above {MOST_GOOD}")
        self.replay = ReplayBuffer(self.buffer_size + 1)  # a new group enters before another one leaves
        self.again: dict[str, list[str]] = {}  # means of a stored group's last re-evaluations, by its uid as text
        self.thresholds = AdaptiveThresholds(self.c2, self.c3, direction="text")
        self.thresholds.update(Fraction(1))  # at the low ends

    def latest(self, group: Group) -> Fraction:
        """What counts as the mean of a stored group: that of its last re-evaluations, otherwise its own."""
        means = [Fraction(mean) for mean in self.again.get(str(group.uid), ())]
        return exact_mean(means) if means else group.mean

    def good(self, group: Group) -> bool:
        """Whether a group is in the range of replay."""
        return self.thresholds.c2 <= self.latest(group) <= self.thresholds.c3

    def _hard(self) -> dict[str, Group]:
        """The groups that were hard when they were stored, the newest of each prompt, by prompt id."""
        return {group.prompt.id: group for group in self.replay if group.mean <= self.c1}

    def begin_step(self, step: int) -> list[Prompt]:
        """Every m steps the prompts of the hard groups; random ones if they are too many."""
        hard = list(self._hard().values()) if due(step, self.reevaluate_every) else []
        if len(hard) > self.max_reevaluated_prompts:
            places = self.rng.choice(len(hard), size=self.max_reevaluated_prompts, replace=False)
            hard = [hard[position] for position in sorted(places.tolist())]
        return [group.prompt for group in hard]

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1, then X2 in the room that is left, then X3 in what is left of it. Fresh groups are stored last."""
        keep = self.keeps(fresh)
        keep = keep if any(keep) else [True] * len(fresh)
        batch = Batch(
            fresh=fitting(compress(fresh, keep), self.max_responses),
            filtered=[group for group, passes in zip(fresh, keep, strict=True) if not passes],
        )
        hard = self._hard()
        improvements: list[Group] = []
        for group in reevaluated:
            store_group = hard[group.prompt.id]
            (improvements if group.mean > store_group.mean else batch.unimproved).append(group)
            uid = str(store_group.uid)
            self.again = self.again | {uid: [*self.again.get(uid, ()), str(group.mean)][-LAST:]}
        batch.reevaluated = self._cut(improvements, self.max_responses - batch.responses)
        batch_uids = {group.uid for group in (*batch.fresh, *batch.reevaluated, *batch.filtered)}
        batch.cut = [group for group in (*fresh, *improvements) if group.uid not in batch_uids]

        if (free := self.max_responses - batch.responses) > 0 and self.replay_steps:
            if self.moving and len(self.replay) >= LEAST_STORED:
                self.thresholds.update(((mean_reward(self.replay) or 0) - Fraction(1, 5)) / Fraction(3, 5))
            candidates = self.replay.sample(free // self.group_size, self.rng, self.good)
            promoted = {hard[group.prompt.id].uid for group in batch.reevaluated}
            batch.replayed = [group for group in candidates if group.uid not in promoted]

        for group in fresh:
            if group.mean <= self.c1 or self.good(group):
                self.replay.add(group)
                self._evict()
        uids = {str(group.uid) for group in self.replay}
        self.again = {uid: means for uid, means in self.again.items() if uid in uids}
        self.measured = {
            "groups/reevaluation_attempts": len(reevaluated),
            "buffer/hard": len(self._hard()),
            **self.replay.metrics(step),
            **self.thresholds.metrics(),
        }
        return batch

    def _cut(self, groups: Sequence[Group], most: int) -> list[Group]:
        places = [(group, position) for group in groups for position in range(group.size)]
        if len(places) <= most:
            return list(groups)
        positions_of: dict[Group, list[int]] = {}
        for index in sorted(self.rng.choice(len(places), size=most, replace=False).tolist()):
            positions_of.setdefault(places[index][0], []).append(places[index][1])
        return [group.keep(positions, relative_to="kept") for group, positions in positions_of.items()]

    def _evict(self) -> None:
        if len(self.replay) <= self.buffer_size:
            return
        good: list[Group] = []  # the oldest first, as in the other two
        hard: list[Group] = []
        rest: list[Group] = []
        for group in self.replay:
            (good if self.good(group) else hard if self.latest(group) <= self.c1 else rest).append(group)
        evictions = [*good[: max(len(good) - MOST_GOOD, 0)], *hard[: max(len(hard) - self.buffer_size + MOST_GOOD, 0)]]
        self.replay.remove([*evictions, *rest[: max(len(self.replay) - len(evictions) - self.buffer_size, 0)]])

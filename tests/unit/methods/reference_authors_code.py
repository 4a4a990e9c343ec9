"""The rules of BAPO's published code on groups of rewards, as plainly as they can be written.

The source is waunx/BAPO_ICLR, commit 426b509: OffPolicyGroupBuffer and OffPolicyManager in
verl/trainer/ppo/ray_trainer.py (line numbers with "trainer" below), and steps 3 to 6 of `fit` in
recipe/bapo/bapo_ray_trainer.py (with "fit"). The class was written from that code, not from this package, so that tests
can compare the two.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Reward = int | float | Fraction
Range = tuple[Fraction, Fraction]

GOOD_PLACES = 8  # The number of high-quality entries that an overfull store keeps is fixed (trainer 187).
GROUPS_KEPT = 4  # They keep the last 32 scores, which are four groups of 8 (max_scores_per_uid).
FEWEST_UIDS = 5  # The range does not move while the store has fewer entries (trainer 1003).
EASY_BELOW, HARD_ABOVE = Fraction("0.2"), Fraction("0.8")  # The range moves between these means (trainer 1012).


def exact(number: Reward) -> Fraction:
    """The number as it is written, so that 0.1 is a tenth."""
    return Fraction(number) if isinstance(number, int | Fraction) else Fraction(str(number))


def mean(rewards: Iterable[Reward]) -> Fraction:
    """The mean without rounding."""
    numbers = [exact(reward) for reward in rewards]
    return sum(numbers, Fraction(0)) / len(numbers)


def inside(value: Fraction, bounds: Range) -> bool:
    """Whether the value lies between the bounds. Both bounds belong to the range."""
    return bounds[0] <= value <= bounds[1]


@dataclass(eq=False)
class Entry:
    """One stored group. Its first rewards never change, and re-evaluations only add newer ones beside them."""

    uid: int
    first: tuple[Reward, ...]
    newer: deque[tuple[Reward, ...]] = field(default_factory=lambda: deque(maxlen=GROUPS_KEPT))

    @property
    def original(self) -> Fraction:
        """The mean of the stored rewards: it decides on re-evaluation and on promotion (trainer 812-816, 944)."""
        return mean(self.first)

    @property
    def latest(self) -> Fraction:
        """The mean over all kept re-evaluations, or the original mean if there are none. X3 and eviction use it."""
        return mean(reward for group in self.newer for reward in group) if self.newer else self.original


@dataclass(kw_only=True)
class AuthorsCode:
    """Their store and their batch, step by step. Their first step is 1. Every group has its own uid.

    A store of at most 8 uids is refused. Theirs has no place for a bad group there: if too full, it evicts even the one
    it is storing, after that one's first response, and may keep the other responses without a score (trainer 143-166).
    """

    capacity: int  # in prompts
    group_size: int
    total_uids: int
    c1: Fraction
    c2: Range  # the least and the largest lower bound of the good range
    c3: Range  # the least and the largest upper bound
    moving: bool
    reeval_freq: int
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.total_uids <= GOOD_PLACES:
            raise ValueError(f"total_uids is {self.total_uids}; this follows their code from {GOOD_PLACES + 1} on")
        self.bad: Range = (Fraction(0), exact(self.c1))
        self.hard: Range = (exact(self.c2[0]), exact(self.c3[0]))
        self.easy: Range = (exact(self.c2[1]), exact(self.c3[1]))
        self.good = self.hard  # The range starts at the two minima (trainer 411).

    def stored(self) -> list[int]:
        """The uids in the store's order, oldest first."""
        return [entry.uid for entry in self.entries]

    def candidates(self, step: int) -> list[int]:
        """The uids that this step may re-evaluate. Only the original mean decides (trainer 812-816)."""
        if step % self.reeval_freq:
            return []
        return [entry.uid for entry in self.entries if inside(entry.original, self.bad)]

    def step(
        self,
        step: int,
        fresh: Sequence[tuple[int, Sequence[Reward]]],
        reevaluated: Sequence[tuple[int, Sequence[Reward]]],
    ) -> dict[str, Any]:
        """One step in their order: filter, re-evaluate, fill up from X2 and then X3, store everything fresh.

        "replayable" is listed even if there is no room for X3. "x3_count" still has groups whose uid is also in X2:
        they drop those later and put nothing in their place (fit 450-453).
        """
        passed = self.passing(fresh)
        x1 = passed[: self.capacity]
        promoted = self.reevaluate(reevaluated)
        free = (self.capacity - len(x1)) * self.group_size  # Room is counted in responses (fit 398).
        x2 = min(free, len(promoted) * self.group_size)
        free -= x2
        if free > 0:
            self.move_range()  # The range stands still in a step that X1 and X2 fill (fit 433-434).
        replayable = [entry.uid for entry in self.entries if inside(entry.latest, self.good)]
        x3 = min(free // self.group_size, len(replayable))
        for uid, rewards in fresh:
            self.store(uid, rewards)
        return {
            "x1": x1,
            "filtered": [uid for uid, _ in fresh if uid not in passed],
            "cut": passed[self.capacity :],
            "promoted": promoted,
            "x2_responses": x2,
            "replayable": replayable,
            "x3_count": x3,
            "range": self.good,
        }

    def passing(self, fresh: Sequence[tuple[int, Sequence[Reward]]]) -> list[int]:
        """The uids that their range filter keeps. It keeps the whole batch if none passes (trainer 714-716).

        They have 1/8 and 7/8 as bounds with groups of 8. With G responses 1/G and 1 - 1/G stand for them, so that with
        rewards of 0 and 1 just the mixed groups pass.
        """
        bounds = (Fraction(1, self.group_size), 1 - Fraction(1, self.group_size))
        passed = [uid for uid, rewards in fresh if inside(mean(rewards), bounds)]
        return passed or [uid for uid, _ in fresh]

    def reevaluate(self, groups: Sequence[tuple[int, Sequence[Reward]]]) -> list[int]:
        """Add the new rewards to their entries, and list the entries that are promoted.

        An entry is promoted if the mean of this new group is above its original mean. Earlier re-evaluations do not
        count. Nothing leaves the store, and the new rewards count whether or not X2 has room (trainer 946-961).
        """
        by_uid = {entry.uid: entry for entry in self.entries}
        for uid, rewards in groups:
            by_uid[uid].newer.append(tuple(rewards))
        return [uid for uid, rewards in groups if mean(rewards) > by_uid[uid].original]

    def move_range(self) -> None:
        """Move the range by the mean of all stored first rewards: low means the easy end (trainer 1007-1026)."""
        if not self.moving or len(self.entries) < FEWEST_UIDS:
            return
        level = mean(reward for entry in self.entries for reward in entry.first)
        share = min(max((level - EASY_BELOW) / (HARD_ABOVE - EASY_BELOW), Fraction(0)), Fraction(1))
        lower, upper = (easy - (easy - hard) * share for easy, hard in zip(self.easy, self.hard, strict=True))
        self.good = (lower, upper)

    def store(self, uid: int, rewards: Sequence[Reward]) -> None:
        """Store a fresh group if its mean is bad or good. Filtered and cut groups come here too (fit 287, 589)."""
        if inside(mean(rewards), self.bad) or inside(mean(rewards), self.good):
            self.entries.append(Entry(uid, tuple(rewards)))
            self.evict()

    def evict(self) -> None:
        """Make the store small enough again, as soon as it has one uid too many (trainer 178-279).

        Then all good entries beyond 8 go at once, however much room that makes, the oldest first. Theirs names the
        stale ones first, which are the oldest, because re-evaluation does not renew the step of birth. An entry in both
        ranges is good. Bad ones have the other places. If there are still too many, the oldest of the others go.
        """
        if len(self.entries) <= self.total_uids:
            return
        good = [entry for entry in self.entries if inside(entry.latest, self.good)]
        bad = [entry for entry in self.entries if inside(entry.latest, self.bad) and entry not in good]
        other = [entry for entry in self.entries if entry not in good and entry not in bad]
        gone = good[: max(0, len(good) - GOOD_PLACES)]
        gone += bad[: max(0, len(bad) - (self.total_uids - GOOD_PLACES))]
        gone += other[: max(0, len(self.entries) - len(gone) - self.total_uids)]
        self.entries = [entry for entry in self.entries if entry not in gone]

"""BAPO after Definition 3.1 and Algorithm 1: a second implementation driven side by side."""

import itertools
import math
from collections import Counter
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import rewards_of, uids
from reference_rules import exact_mean, exact_variance

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods import BAPO


def bapo(**changes) -> BAPO:
    return BAPO(**{"capacity": 256, "group_size": 8, **changes})


def test_a_subclass_can_replace_eq_6(make_group):
    """Only means of at least 1/2 improve: what is above c1 and below 1/2 stays, as what is still too hard does."""

    class Half(BAPO):
        def improved(self, group):
            return F(1, 2) <= group.mean < 1

    method = Half(capacity=9, group_size=8, reevaluate_every=1)
    method.build_batch(0, [make_group(0, prompt=name) for name in "abcd"], [])
    groups = [make_group(right, prompt=name, step=1) for name, right in zip("abcd", (0, 3, 4, 8), strict=True)]
    batch = method.build_batch(1, [], groups)
    assert (batch.unimproved, batch.reevaluated, batch.solved) == (groups[:2], [groups[2]], [groups[3]])
    assert [entry.prompt.text for entry in method.hard.oldest(9)] == ["a", "b"]


def test_constants_follow_the_thresholds(make_group):
    method = bapo(eps=0.0)
    worst = 8 / math.sqrt(7) - 1
    assert method.constants() == pytest.approx((worst, worst, worst))
    method.build_batch(0, [make_group(8)], [])  # c2 = 4/8, c3 = 5/8: variances 16/64 and 15/64
    assert method.constants() == pytest.approx((worst, worst, 8 / math.sqrt(15) - 1))
    assert bapo(group_size=10, c1=F(1, 5), eps=0.0).constants()[:2] == pytest.approx((7 / 3, 1.5))
    assert bapo(c1=F(0)).constants()[1] == pytest.approx(999.0)


def test_unknown_direction_is_an_error():
    with pytest.raises(ValueError, match="direction"):
        bapo(threshold_direction="up")


# Written from the description of the method only: plain lists, dictionaries and fractions, whole lists searched again
# at every step. It does not draw: what was replayed is handed to it, and it says whether that was a possible draw.


class Plain:
    """The whole method on groups that are dictionaries: uid, key, rewards, step, policy."""

    def __init__(self, s: dict) -> None:
        self.s = s
        self.hard: list[tuple[str, F, int]] = []  # key, mean, step; oldest first
        self.high: list[dict] = []  # oldest first
        self.r: F | None = None

    @staticmethod
    def mean(group: dict) -> F:
        return exact_mean(group["rewards"])

    @staticmethod
    def signal(group: dict) -> bool:
        return len(set(group["rewards"])) > 1

    def due(self, t: int) -> list[str]:
        every = self.s["reevaluate_every"]
        if every and t > 0 and t % every == 0:
            return [key for key, _, _ in self.hard][: self.s["max_reevaluated_prompts"]]
        return []

    def fail(self, group: dict) -> None:
        self.hard = [entry for entry in self.hard if entry[0] != group["key"]]
        self.hard.append((group["key"], self.mean(group), group["step"]))
        self.hard = self.hard[-self.s["buffer_size"] :]

    def range_today(self) -> tuple[F, F]:
        position = self.r if self.r is not None else F(0)
        if self.s["threshold_direction"] == "text":
            position = 1 - position
        c2, c3 = self.s["c2"], self.s["c3"]
        return c2.low + position * (c2.high - c2.low), c3.low + position * (c3.high - c3.low)

    def step(self, t, fresh: list[dict], reevaluated: list[dict], failed: list[str], drawn_x3: list[int]) -> dict:
        """What the batch must be, given which stored groups were replayed.

        A prompt whose verifier failed goes to the back of the queue.
        """
        if fresh:
            mean = exact_mean(reward for group in fresh for reward in group["rewards"])
            self.r = F(0) if mean < 0 else F(1) if mean > 1 else mean
        c2, c3 = self.range_today()

        x1 = [group for group in fresh if self.s["filter"] == "none" or self.signal(group)]
        x2, unimproved, solved = [], [], []
        for group in reevaluated:
            if self.mean(group) <= self.s["c1"]:
                self.fail(group)
                unimproved.append(group["uid"])
                continue
            self.hard = [entry for entry in self.hard if entry[0] != group["key"]]
            if self.signal(group):
                x2.append(group)
            else:
                solved.append(group["uid"])

        for key in failed:
            self.hard.sort(key=lambda entry, key=key: entry[0] == key)

        # X3: at most `replay_steps` old, never of this step, in range today, no prompt of X2; as many as fit
        self.high = [group for group in self.high if t - group["step"] <= self.s["replay_steps"]]
        taken = [group["key"] for group in x2]
        eligible = [group["uid"] for group in self.high if c2 <= self.mean(group) <= c3 and group["key"] not in taken]
        assert all(group["step"] < t for group in self.high)
        want = max(min(len(eligible), self.s["capacity"] - len(x1) - len(x2)), 0)
        assert len(drawn_x3) == want
        assert drawn_x3 == [uid for uid in eligible if uid in set(drawn_x3)]

        # the union, made to fit by dropping the least informative of X1 and X2, one after the other
        pool, cut = x1 + x2, []
        while len(pool) + want > self.s["capacity"]:
            worst = pool[0]
            for group in pool[1:]:
                here, there = ((exact_variance(one["rewards"]), one["policy"], one["uid"]) for one in (group, worst))
                worst = group if here < there else worst
            pool.remove(worst)
            cut.append(worst["uid"])

        for group in fresh:
            if self.mean(group) <= self.s["c1"]:
                self.fail(group)
            if self.s["replay_steps"] and c2 <= self.mean(group) <= c3:
                self.high = [*self.high, group][-self.s["buffer_size"] :]
        return {
            "fresh": [group["uid"] for group in x1 if group["uid"] not in cut],
            "reevaluated": [group["uid"] for group in x2 if group["uid"] not in cut],
            "filtered": [group["uid"] for group in fresh if group not in x1],
            "unimproved": unimproved,
            "solved": solved,
            "cut": sorted(cut),
        }


fractions_of_g = st.sampled_from([F(k, g) for g in (3, 4, 8, 10) for k in range(g + 1)])


@st.composite
def schedules(draw) -> dict:
    """Settings of a run: the options of BAPO, and v."""
    (low2, high2), (low3, high3) = (sorted((draw(fractions_of_g), draw(fractions_of_g))) for _ in "23")
    return {
        "group_size": draw(st.sampled_from([2, 3, 4, 5, 10])),
        "capacity": draw(st.integers(0, 12)),
        "filter": draw(st.sampled_from(["range", "range", "none"])),
        "c1": draw(st.sampled_from([F(0), F(1, 10), F(1, 5), F(1, 4), F(1, 3), F(1, 2)])),
        "c2": Interval(min(low2, low3), min(high2, high3)),
        "c3": Interval(max(low2, low3), max(high2, high3)),
        "threshold_direction": draw(st.sampled_from(["eq8", "text"])),
        "buffer_size": draw(st.integers(1, 12)),
        "replay_steps": draw(st.integers(0, 3)),
        "reevaluate_every": draw(st.integers(0, 3)),
        "max_reevaluated_prompts": draw(st.integers(1, 6)),
        "v": draw(st.integers(1, 3)),
    }


KEYS = [f"prompt {letter}" for letter in "abcdefgh"]


class SideBySide:
    def __init__(self, make_group, s: dict, met: Counter[str]) -> None:
        self.make_group, self.s, self.v, self.met = make_group, s, s.pop("v"), met
        self.plain, self.method = Plain(s), BAPO(**s)
        self.t, self.uids = 0, itertools.count()

    def groups(self, outcomes: list[tuple[str, list[float]]], policy: int) -> list[dict]:
        return [
            {"uid": next(self.uids), "key": key, "rewards": rewards, "step": self.t, "policy": policy}
            for key, rewards in outcomes
        ]

    def real(self, groups: list[dict]):
        return [
            self.make_group(g["rewards"], prompt=g["key"], step=g["step"], weights_version=g["policy"], uid=g["uid"])
            for g in groups
        ]

    def check_step(self, fresh_outcomes, reevaluated_rewards) -> None:
        """The rewards of a prompt whose verifier fails are None."""
        t, method, plain = self.t, self.method, self.plain
        c2, c3 = plain.range_today()
        recent = [group for group in plain.high if t - group["step"] <= self.s["replay_steps"]]
        replayable = sum(c2 <= plain.mean(group) <= c3 for group in recent)
        assert method.wanted(t, 99) == self.s["capacity"] - replayable
        named = method.begin_step(t)
        assert [prompt.text for prompt in named] == plain.due(t)
        answers = list(zip(plain.due(t), reevaluated_rewards, strict=True))
        reevaluated = self.groups([answer for answer in answers if answer[1]], policy=t)
        failed = [key for key, rewards in answers if not rewards]
        method.unanswered([prompt for prompt in named if prompt.text in failed])
        fresh = self.groups(fresh_outcomes, policy=t - t % self.v)
        real_fresh, real_reevaluated = self.real(fresh), self.real(reevaluated)
        batch = method.build_batch(t, real_fresh, real_reevaluated)

        expected = plain.step(t, fresh, reevaluated, failed, uids(batch.replayed))
        for name in ("fresh", "reevaluated", "filtered", "unimproved", "solved"):
            assert uids(getattr(batch, name)) == expected[name]
        assert sorted(uids(batch.cut)) == expected["cut"]
        assert len(batch) <= self.s["capacity"]

        assert [(e.prompt.text, e.mean, e.step) for e in method.hard.oldest(99)] == plain.hard
        assert uids(method.replay) == [group["uid"] for group in plain.high]
        assert (method.thresholds.c2, method.thresholds.c3) == plain.range_today()
        assert method.thresholds.average_reward == plain.r
        settled, _ = Ledger().settle(real_fresh + real_reevaluated, batch)
        self.met.update(settled, replayed=len(batch.replayed), failed=len(failed))
        metrics = {
            "groups/reevaluation_attempts": len(reevaluated),
            "buffer/hard": len(plain.hard),
            "buffer/replay": len(plain.high),
            "threshold/average_reward": float(plain.r or 0),
        }
        assert metrics.items() <= method.metrics().items()
        method.hard.check()
        method.replay.check()
        self.t += 1


def test_side_by_side_with_the_plain_implementation(make_group):
    met: Counter[str] = Counter()

    @settings(max_examples=4 * settings.default.max_examples, derandomize=True, database=None)
    @given(s=schedules(), data=st.data())
    def check(s, data):
        pair = SideBySide(make_group, s, met)
        for count in data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=15)):
            rewards, due = rewards_of(s["group_size"]), len(pair.plain.due(pair.t))
            outcomes = st.lists(st.tuples(st.sampled_from(KEYS), rewards), min_size=count, max_size=count)
            answers = st.lists(rewards | st.none(), min_size=due, max_size=due)
            pair.check_step(data.draw(outcomes), data.draw(answers))

    check()
    # the runs have seen every source at work, or the comparison would say little
    ends = ("fresh", "reevaluated", "replayed", "filtered", "cut", "unimproved", "solved", "failed")
    assert min(met[end] for end in ends) > 0, met

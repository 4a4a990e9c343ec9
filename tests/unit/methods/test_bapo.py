"""BAPO after Definition 3.1 and Algorithm 1: a second implementation driven side by side, and the mini-test by hand."""

import math
from collections import Counter
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import uids

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods import BAPO


def bapo(**changes) -> BAPO:
    return BAPO(**{"capacity": 256, "group_size": 8, **changes})


def hard_texts(method: BAPO) -> list[str]:
    return [entry["prompt"]["text"] for entry in method.hard.state_dict()["entries"]]


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]


def run(method: BAPO, step: int, fresh=(), reevaluated=()):
    """One step whose re-evaluation is given; each of its groups ends in exactly one list of the batch."""
    method.begin_step(step)
    batch = method.build_batch(step, list(fresh), list(reevaluated))
    Ledger().settle([*fresh, *reevaluated], batch)
    return batch


def test_a_subclass_can_replace_eq_6(make_group):
    """Only means of at least 1/2 improve: what is above c1 and below 1/2 stays, as what is still too hard does."""

    class Half(BAPO):
        def improved(self, group):
            return F(1, 2) <= group.mean < 1

    method = Half(capacity=9, group_size=8, reevaluate_every=1)
    run(method, 0, [make_group(0, prompt=name) for name in "abcd"])
    groups = [make_group(right, prompt=name, step=1) for name, right in zip("abcd", (0, 3, 4, 8), strict=True)]
    batch = run(method, 1, [], groups)
    assert (batch.unimproved, batch.reevaluated, batch.solved) == (groups[:2], [groups[2]], [groups[3]])
    assert hard_texts(method) == ["a", "b"]


def test_the_mini_test_of_section_5_2(make_group):
    half = Interval(F(1, 2), F(1, 2))
    method = bapo(c1=F(0), reevaluate_every=1, c2=half, c3=half)
    fresh = [make_group(right, prompt=f"{right} of 8") for right in range(9)]
    batch = run(method, 0, fresh)
    assert batch.fresh == fresh[1:8]
    assert hard_texts(method) == ["0 of 8"] and list(method.replay) == [fresh[4]]
    assert texts(method.begin_step(1)) == ["0 of 8"]
    again = make_group(1, step=1, prompt="0 of 8")
    batch = method.build_batch(1, [make_group(5, step=1)], [again])
    assert (batch.reevaluated, batch.replayed) == ([again], [fresh[4]])


def test_constants_follow_the_thresholds(make_group):
    method = bapo(eps=0.0)
    worst = 8 / math.sqrt(7) - 1
    assert method.constants() == pytest.approx((worst, worst, worst))
    run(method, 0, [make_group(8)])  # c2 = 4/8, c3 = 5/8: variances 16/64 and 15/64
    assert method.constants() == pytest.approx((worst, worst, 8 / math.sqrt(15) - 1))
    assert bapo(group_size=10, c1=F(1, 5), eps=0.0).constants()[:2] == pytest.approx((7 / 3, 1.5))
    assert bapo(c1=F(0)).constants()[1] == pytest.approx(999.0)


# --- A second implementation -----------------------------------------------------------------------------------------
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
        return sum(map(F, group["rewards"]), F(0)) / len(group["rewards"])

    @staticmethod
    def variance(group: dict) -> F:
        middle = Plain.mean(group)
        return sum(((F(reward) - middle) ** 2 for reward in group["rewards"]), F(0)) / len(group["rewards"])

    @staticmethod
    def signal(group: dict) -> bool:
        return len(set(group["rewards"])) > 1

    def due(self, t: int) -> list[str]:
        if self.s["m"] and t > 0 and t % self.s["m"] == 0:
            return [key for key, _, _ in self.hard][: self.s["most"]]
        return []

    def fail(self, group: dict) -> None:
        self.hard = [entry for entry in self.hard if entry[0] != group["key"]]
        self.hard.append((group["key"], self.mean(group), group["step"]))
        self.hard = self.hard[-self.s["stored"] :]

    def range_today(self) -> tuple[F, F]:
        position = self.r if self.r is not None else F(0)
        if self.s["direction"] == "text":
            position = 1 - position
        (low2, high2), (low3, high3) = self.s["c2"], self.s["c3"]
        return low2 + position * (high2 - low2), low3 + position * (high3 - low3)

    def step(self, t, fresh: list[dict], reevaluated: list[dict], failed: list[str], drawn_x3: list[int]) -> dict:
        """What the batch must be, given which stored groups were replayed.

        A prompt whose verifier failed goes to the back of the queue.
        """
        if fresh:
            mean = self.mean({"rewards": [reward for group in fresh for reward in group["rewards"]]})
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

        # X3: at most 3 (here: `age`) steps old, never of this step, in range today, no prompt of X2; as many as fit
        self.high = [group for group in self.high if t - group["step"] <= self.s["age"]]
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
                here, there = ((self.variance(one), one["policy"], one["uid"]) for one in (group, worst))
                worst = group if here < there else worst
            pool.remove(worst)
            cut.append(worst["uid"])

        for group in fresh:
            if self.mean(group) <= self.s["c1"]:
                self.fail(group)
            if self.s["age"] and c2 <= self.mean(group) <= c3:
                self.high = [*self.high, group][-self.s["stored"] :]
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
    """Settings of a run."""
    (low2, high2), (low3, high3) = (sorted((draw(fractions_of_g), draw(fractions_of_g))) for _ in "23")
    return {
        "size": draw(st.sampled_from([2, 3, 4, 5, 10])),
        "capacity": draw(st.integers(0, 12)),
        "filter": draw(st.sampled_from(["range", "range", "none"])),
        "c1": draw(st.sampled_from([F(0), F(1, 10), F(1, 5), F(1, 4), F(1, 3), F(1, 2)])),
        "c2": (min(low2, low3), min(high2, high3)),
        "c3": (max(low2, low3), max(high2, high3)),
        "direction": draw(st.sampled_from(["eq8", "text"])),
        "stored": draw(st.integers(1, 12)),
        "age": draw(st.integers(0, 3)),
        "m": draw(st.integers(0, 3)),
        "most": draw(st.integers(1, 6)),
        "v": draw(st.integers(1, 3)),
    }


def build(s: dict) -> BAPO:
    return BAPO(
        capacity=s["capacity"],
        group_size=s["size"],
        filter=s["filter"],
        c1=s["c1"],
        c2=Interval(*s["c2"]),
        c3=Interval(*s["c3"]),
        threshold_direction=s["direction"],
        buffer_size=s["stored"],
        replay_steps=s["age"],
        reevaluate_every=s["m"],
        max_reevaluated_prompts=s["most"],
    )


KEYS = [f"prompt {letter}" for letter in "abcdefgh"]


class SideBySide:
    """BAPO and the plain implementation on the same groups."""

    def __init__(self, make_group, s: dict, met: Counter[str]) -> None:
        self.make_group, self.s = make_group, s
        self.plain = Plain(s)
        self.method, self.met = build(s), met
        self.t, self.uid = 0, 0

    def groups(self, outcomes: list[tuple[str, list[float]]], policy: int) -> list[dict]:
        result = []
        for key, rewards in outcomes:
            result.append({"uid": self.uid, "key": key, "rewards": rewards, "step": self.t, "policy": policy})
            self.uid += 1
        return result

    def real(self, groups: list[dict]):
        return [
            self.make_group(g["rewards"], prompt=g["key"], step=g["step"], weights_version=g["policy"], uid=g["uid"])
            for g in groups
        ]

    def check_step(self, fresh_outcomes, reevaluated_rewards) -> None:
        """The rewards of a prompt whose verifier fails are None."""
        t, method, plain = self.t, self.method, self.plain
        c2, c3 = plain.range_today()
        recent = [group for group in plain.high if t - group["step"] <= self.s["age"]]
        replayable = sum(c2 <= plain.mean(group) <= c3 for group in recent)
        assert method.wanted(t, 99) == self.s["capacity"] - replayable
        named = method.begin_step(t)
        assert texts(named) == plain.due(t)
        answers = list(zip(plain.due(t), reevaluated_rewards, strict=True))
        reevaluated = self.groups([answer for answer in answers if answer[1]], policy=t)
        failed = [key for key, rewards in answers if not rewards]
        method.unanswered([prompt for prompt in named if prompt.text in failed])
        fresh = self.groups(fresh_outcomes, policy=t - t % self.s["v"])
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


@st.composite
def rewards(draw, size: int) -> list[float]:
    """Mostly 0/1, with every number right equally likely; now and then others."""
    if draw(st.integers(0, 5)):
        right = draw(st.integers(0, size))
        return [1.0] * right + [0.0] * (size - right)
    return draw(st.lists(st.sampled_from([-0.5, 0.0, 0.25, 0.5, 1.0, 2.0]), min_size=size, max_size=size))


def test_side_by_side_with_the_plain_implementation(make_group):
    met: Counter[str] = Counter()

    @settings(max_examples=4 * settings.default.max_examples, derandomize=True, database=None)
    @given(s=schedules(), data=st.data())
    def check(s, data):
        pair = SideBySide(make_group, s, met)
        for count in data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=15)):
            outcomes = data.draw(
                st.lists(st.tuples(st.sampled_from(KEYS), rewards(s["size"])), min_size=count, max_size=count)
            )
            due = len(pair.plain.due(pair.t))
            pair.check_step(outcomes, data.draw(st.lists(rewards(s["size"]) | st.none(), min_size=due, max_size=due)))

    check()
    # the runs have seen every source at work, or the comparison would say little
    ends = ("fresh", "reevaluated", "replayed", "filtered", "cut", "unimproved", "solved", "failed")
    assert min(met[end] for end in ends) > 0, met

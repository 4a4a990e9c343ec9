"""BAPO after Definition 3.1 and Algorithm 1: a second implementation driven side by side, and the mini-test by hand."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from one_step import uids

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.rewards import as_fraction
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods import BAPO

C2, C3 = Interval(F(1, 8), F(4, 8)), Interval(F(2, 8), F(5, 8))


def bapo(seed: int = 0, **changes) -> BAPO:
    return BAPO(**{"capacity": 256, "group_size": 8, "seed": seed, **changes})


def fixed_interval(low: str | F, high: str | F) -> dict[str, Interval]:
    """c2 and c3 that do not move."""
    return {"c2": Interval(as_fraction(low), as_fraction(low)), "c3": Interval(as_fraction(high), as_fraction(high))}


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
    """c1 = 0, c2 = c3 = 1/2."""
    method = bapo(c1=F(0), reevaluate_every=1, **fixed_interval("1/2", "1/2"))
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
# at every step. It does not draw: what was drawn is handed to it, and it says whether that was a possible draw.


class Plain:
    """The whole method on groups that are dictionaries: uid, key, rewards, step, policy."""

    def __init__(self, s: dict) -> None:
        self.s = s
        self.hard: list[tuple[str, F, int]] = []  # key, mean, step; oldest first
        self.high: list[dict] = []  # oldest first
        self.r: F | None = None
        self.count: Counter[str] = Counter()

    @staticmethod
    def mean(group: dict) -> F:
        total = F(0)
        for reward in group["rewards"]:
            total += F(reward)
        return total / len(group["rewards"])

    @staticmethod
    def variance(group: dict) -> F:
        middle, total = Plain.mean(group), F(0)
        for reward in group["rewards"]:
            total += (F(reward) - middle) ** 2
        return total / len(group["rewards"])

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

    def possible_x1(self, fresh: list[dict], kept: list[dict]) -> bool:
        informative = [group for group in fresh if self.signal(group)]
        match self.s["filter"]:
            case "none":
                return kept == fresh
            case "range":
                return kept == informative
            case "gaussian":
                sure = [group for group in informative if self.mean(group) == F(1, 2)]
                return all(group in informative for group in kept) and all(group in kept for group in sure)
            case "top_p":  # of 9/10: without any one of them, too little is left
                sums = [sum(map(self.variance, groups), F(0)) for groups in (fresh, kept)]
                least = min(map(self.variance, kept), default=F(0))
                others = [self.variance(group) for group in fresh if group not in kept]
                ordered = max(others, default=F(0)) <= least or not kept
                return ordered and sums[1] >= F(9, 10) * sums[0] and (not kept or sums[1] - least < F(9, 10) * sums[0])
            case "uniform":
                return abs(len(kept) - 0.6 * len(fresh)) <= 0.5 and all(group in fresh for group in kept)
        raise AssertionError

    def step(self, t, fresh: list[dict], reevaluated: list[dict], failed: list[str], drawn_x1: set, drawn_x3) -> dict:
        """What the batch must be, given which fresh groups the filter drew and which stored ones were replayed.

        A prompt whose verifier failed goes to the back of the queue.
        """
        if fresh:
            total = sum((F(reward) for group in fresh for reward in group["rewards"]), F(0))
            mean = total / sum(len(group["rewards"]) for group in fresh)
            mean = F(0) if mean < 0 else F(1) if mean > 1 else mean
            self.r = mean
        c2, c3 = self.range_today()

        x1 = [group for group in fresh if group["uid"] in drawn_x1]
        assert self.possible_x1(fresh, x1)

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
        have = len(x1) + len(x2)
        fitting = [count for count in range(len(eligible) + 1) if have + count <= self.s["capacity"]]
        want = max(fitting) if fitting else 0
        assert len(drawn_x3) == want
        assert drawn_x3 == [uid for uid in eligible if uid in set(drawn_x3)]

        # the union, made to fit by dropping the least informative of X1 and X2, one after the other
        pool, cut = x1 + x2, []
        while len(pool) + want > self.s["capacity"]:
            worst = pool[0]
            for group in pool[1:]:
                here, there = self.variance(group), self.variance(worst)
                if here < there or (
                    here == there and (group["policy"], group["uid"]) < (worst["policy"], worst["uid"])
                ):
                    worst = group
            pool.remove(worst)
            cut.append(worst["uid"])

        for group in fresh:
            if self.mean(group) <= self.s["c1"]:
                self.fail(group)
            if self.s["age"] and c2 <= self.mean(group) <= c3:
                self.high = [*self.high, group][-self.s["stored"] :]
        result = {
            "fresh": [group["uid"] for group in x1 if group["uid"] not in cut],
            "reevaluated": [group["uid"] for group in x2 if group["uid"] not in cut],
            "filtered": [group["uid"] for group in fresh if group not in x1],
            "unimproved": unimproved,
            "solved": solved,
            "cut": sorted(cut),
        }
        self.count.update({name: len(listed) for name, listed in result.items()})
        self.count["generated"] += len(fresh) + len(reevaluated)
        return result


fractions_of_g = st.sampled_from([F(k, g) for g in (3, 4, 8, 10) for k in range(g + 1)])


@st.composite
def schedules(draw) -> dict:
    """Settings of a run."""
    low2, high2 = sorted((draw(fractions_of_g), draw(fractions_of_g)))
    low3, high3 = sorted((draw(fractions_of_g), draw(fractions_of_g)))
    return {
        "size": draw(st.sampled_from([2, 3, 4, 5, 10])),
        "capacity": draw(st.integers(0, 12)),
        "filter": draw(st.sampled_from(["range", "range", "gaussian", "uniform", "top_p", "none"])),
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
        self.method, self.ledger = build(s), Ledger()
        self.met = met
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

        fresh_uids = {group["uid"] for group in fresh}
        drawn = (set(uids(batch.fresh)) | set(uids(batch.cut))) & fresh_uids
        expected = plain.step(t, fresh, reevaluated, failed, drawn, uids(batch.replayed))
        for name in ("fresh", "reevaluated", "filtered", "unimproved", "solved"):
            assert uids(getattr(batch, name)) == expected[name]
        assert sorted(uids(batch.cut)) == expected["cut"]
        assert batch.too_far == batch.nonfinite == batch.unused == []  # known only after the method is done
        assert len(batch) <= self.s["capacity"]
        used = uids(group for _, group in batch.with_sources())
        assert len(set(used)) == len(used) == len(batch)

        assert [(e.prompt.text, e.mean, e.step) for e in method.hard.oldest(99)] == plain.hard
        assert uids(method.replay) == [group["uid"] for group in plain.high]
        assert (method.thresholds.c2, method.thresholds.c3) == plain.range_today()
        assert method.thresholds.average_reward == plain.r
        settled, _ = self.ledger.settle(real_fresh + real_reevaluated, batch)
        self.met.update(settled, replayed=len(batch.replayed), failed=len(failed))
        assert +self.ledger.counts == +plain.count
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

    class Machine(RuleBasedStateMachine):
        @initialize(s=schedules())
        def start(self, s):
            self.s, self.pair = s, SideBySide(make_group, s, met)

        @rule(data=st.data(), count=st.integers(0, 7))
        def step(self, data, count):
            outcomes = data.draw(
                st.lists(st.tuples(st.sampled_from(KEYS), rewards(self.s["size"])), min_size=count, max_size=count)
            )
            due = len(self.pair.plain.due(self.pair.t))
            again = data.draw(st.lists(rewards(self.s["size"]) | st.none(), min_size=due, max_size=due))
            self.pair.check_step(outcomes, again)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2 * settings.default.max_examples, stateful_step_count=20, derandomize=True, database=None
        ),
    )
    # the runs have seen every source at work, or the comparison would say little
    ends = ("fresh", "reevaluated", "replayed", "filtered", "cut", "unimproved", "solved", "failed")
    assert min(met[end] for end in ends) > 0, met


@given(right=st.integers(0, 8), reward=st.sampled_from([0.0, 1.0]))
@settings(max_examples=settings.default.max_examples // 5, derandomize=True, database=None)
def test_the_plain_implementation_agrees_with_definition_3_1(right, reward):
    """Its own formulas against the paper's words for 0/1 rewards, so that the two do not share a mistake."""
    group = {"rewards": [1.0] * right + [0.0] * (8 - right)}
    assert Plain.mean(group) == F(right, 8)
    assert Plain.variance(group) == F(right * (8 - right), 64)
    assert Plain.signal(group) == (F(1, 8) <= F(right, 8) <= F(7, 8))
    assert not Plain.signal({"rewards": [reward] * 8})

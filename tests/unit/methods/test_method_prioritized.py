"""Prioritised replay and re-evaluation: draws by hand and by frequency."""

from __future__ import annotations

import copy
import itertools
import math
import random
from fractions import Fraction as F
from types import SimpleNamespace

import numpy as np
import pytest

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.methods.prioritized import PrioritizedBAPO

WIDE = {"c2": Interval(F(0), F(0)), "c3": Interval(F(1), F(1))}


def made(seed: int = 0, **changes) -> PrioritizedBAPO:
    return PrioritizedBAPO(**{"capacity": 8, "group_size": 4, "seed": seed, **changes})


def uids(groups) -> list[int]:
    return [group.uid for group in groups]


class TestReplay:
    def stored(self, make_group, errors, **changes):
        method = made(**WIDE, **changes)
        groups = [make_group(2, size=4, prompt=f"p{n}", step=0) for n in range(len(errors))]
        for group in groups:
            method.replay.add(group)
        method.observe(0, {group.uid: error for group, error in zip(groups, errors, strict=True) if error is not None})
        return method, groups

    def inclusion(self, weights, count):
        """P(group is drawn), by going through every order of draws without replacement."""
        found = [0.0] * len(weights)
        for order in itertools.permutations(range(len(weights)), count):
            chance, left = 1.0, sum(weights)
            for index in order:
                chance, left = chance * weights[index] / left, left - weights[index]
            for index in order:
                found[index] += chance
        return found

    @pytest.mark.parametrize(
        ("errors", "exponent", "count"),
        [
            ((0.1, 0.4, 0.9, 0.2), 1.0, 1),
            ((0.1, 0.4, 0.9, 0.2), 0.6, 2),
            ((0.0, 0.5, 1.0, 2.0), 0.5, 3),
            ((0.1, 0.9, 0.5), 0.0, 2),
            ((0.1, None, 0.5), 1.0, 1),  # not trained on yet: as the largest
        ],
    )
    def test_frequencies(self, make_group, errors, exponent, count):
        method, groups = self.stored(make_group, errors, exponent=exponent)
        known = [error for error in errors if error is not None]
        weights = [((max(known) if error is None else error) + 1e-6) ** exponent for error in errors]
        draws = 6000
        counts = dict.fromkeys(uids(groups), 0)
        for _ in range(draws):
            drawn = method.draw_replay(count, lambda group: True)
            assert len(set(uids(drawn))) == count and uids(drawn) == sorted(uids(drawn))
            for group in drawn:
                counts[group.uid] += 1
        for group, chance in zip(groups, self.inclusion(weights, count), strict=True):
            spread = math.sqrt(draws * chance * (1 - chance)) + 1
            assert abs(counts[group.uid] - draws * chance) < 5 * spread

    def test_only_what_is_accepted_and_no_more_than_there_is(self, make_group):
        method, groups = self.stored(make_group, (0.1, 0.5, 0.9))
        assert method.draw_replay(5, lambda group: group is not groups[1]) == [groups[0], groups[2]]
        assert method.draw_replay(0, lambda group: True) == method.draw_replay(2, lambda group: False) == []

    def test_errors_are_the_last_ones_of_what_is_stored(self, make_group):
        method, (first, second, third) = self.stored(make_group, (0.1, None, 0.9))
        assert method.errors == {first.uid: 0.1, third.uid: 0.9}
        method.observe(1, {second.uid: 0.3, first.uid: 0.2, 999: 7.0})
        assert method.errors == {first.uid: 0.2, second.uid: 0.3, third.uid: 0.9}
        method.replay.expire(99)
        method.observe(99, {})
        assert method.errors == {}


class TestReevaluation:
    def test_draws_above_c1_first_the_oldest_before_the_others_then_the_nearest(self, make_group):
        method = made(c1=F(1, 8), reevaluate_every=1)
        for n in range(5):
            method.hard.add(make_group(0, size=4, prompt=f"p{n}", step=0))
        asked = []

        def beta(a, b):
            asked.append((a.tolist(), b.tolist()))
            return np.array([0.05, 0.3, 0.125, 0.12, 0.9])

        method.rng = SimpleNamespace(beta=beta)
        assert [prompt.text for prompt in method.draw_hard(2)] == ["p1", "p2"]
        assert [prompt.text for prompt in method.begin_step(1)] == ["p1", "p2", "p4", "p3", "p0"]
        assert method.draw_hard(0) == [] and asked == [([1.0] * 5, [1.0] * 5)] * 2

    def test_posteriors_count_fresh_and_reevaluated_groups(self, make_group):
        method = made(decay=0.5, reevaluate_every=1)
        failed = make_group(0, size=4, prompt="p", step=0)
        method.build_batch(0, [failed, make_group(3, size=4, prompt="q", step=0)], [])
        assert method.begin_step(1) == [failed.prompt]
        method.build_batch(1, [], [make_group(1, size=4, prompt="p", step=1)])
        counts, known = method.posteriors.of([failed.prompt, make_group(0, prompt="r").prompt])
        # (1, 1) -> (1, 5) -> 1/2 (1, 5) + 1/2 (1, 1) + (1, 3)
        assert counts.tolist() == [[2.0, 6.0], [1.0, 1.0]] and known.tolist() == [True, False]

    def test_prompts_that_nearly_succeeded_come_more_often(self, make_group):
        method = made(c1=F(1, 2), reevaluate_every=1, decay=1.0)
        method.build_batch(0, [make_group(right, size=4, prompt=f"p{right}", step=0) for right in (0, 1)] * 3, [])
        first = [method.draw_hard(1)[0].text for _ in range(500)]
        assert 250 < first.count("p1") < 500


def drive(method, steps: int, make_group, seed: int = 5, start: int = 0):
    """The batches of a random run, each of whose groups ends in one state."""
    batches, ledger = [], Ledger()
    for step in range(start, start + steps):
        rng = random.Random(1000 * seed + step)
        again = method.begin_step(step)
        uid = iter(range(100 * step, 100 * step + 99))
        groups = [make_group(rng.randrange(5), size=4, prompt=f"p{rng.randrange(20)}", step=step, policy_step=step,
                             uid=next(uid)) for _ in range(6)]  # fmt: skip
        hard = [make_group(rng.randrange(5), size=4, prompt=prompt, step=step, policy_step=step, uid=next(uid))
                for prompt in again]  # fmt: skip
        batch = method.build_batch(step, groups, hard)
        ledger.settle(groups + hard, batch)
        method.observe(step, {group.uid: rng.random() for _, group in batch.with_sources()})
        named = [prompt.text for prompt in again]
        batches.append((named, uids(batch.fresh), uids(batch.reevaluated), uids(batch.replayed), uids(batch.cut)))
    return batches


FLAGS = {"reevaluate_every": 2, "max_reevaluated_prompts": 2, "buffer_size": 9, "replay_buffer_size": 9, **WIDE}


def test_resumed_it_goes_on_as_if_it_had_not_stopped(make_group):
    whole = made(3, **FLAGS)
    drive(whole, 9, make_group)
    state = copy.deepcopy(whole.state_dict())
    resumed = made(99, **FLAGS)
    resumed.load_state_dict(state)
    assert resumed.errors == whole.errors and resumed.errors
    assert drive(resumed, 9, make_group, start=9) == drive(whole, 9, make_group, start=9)
    assert resumed.state_dict()["errors"] == whole.state_dict()["errors"]


def test_state_of_bapo_is_refused():
    with pytest.raises(ValueError, match="state of method 'bapo', version 1; expected 'bapo_prioritized'"):
        made().load_state_dict(BAPO(capacity=8, group_size=4).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exponent": -0.1}, r"exponent is -0.1; it must be within \[0, 10\]"),
        ({"exponent": math.nan}, "exponent is nan"),
        ({"exponent": 10.5}, "exponent is 10.5"),
        ({"decay": 1.5}, r"decay is 1.5; it must be within \[0, 1\]"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)

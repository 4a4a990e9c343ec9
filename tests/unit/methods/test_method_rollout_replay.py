"""Rollout-level replay: draws against the enumerated chances, and whole runs against the independent rules."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import advantages, places, run, uids

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.rollout_replay import RolloutReplay


def rollout_replay(capacity: int = 8, **options) -> RolloutReplay:
    return RolloutReplay(capacity=capacity, **{"group_size": 8, "warm_up": 0} | options)


def names(groups) -> list[tuple[int, int]]:
    """Each response as the number of its group and its place there."""
    return [(group.uid, place) for group in groups for place in places(group)]


class TestDraw:
    STORED = ([1, 0, 0], [0, 1, 1], [0, 0.5, 1])  # the middle of the last has an advantage of 0

    @pytest.mark.parametrize(
        ("exponent", "count"),
        [
            (0.5, 2),
            (2.0, 3),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in ((0.5, 1), (1.0, 2), (0.0, 2), (0.5, 7), (10.0, 1))
            ),
        ],
    )
    def test_frequencies(self, make_group, exponent, count):
        """Which responses, over many draws, against the enumerated chance of every set."""
        stored = [make_group(rewards) for rewards in self.STORED[: 3 if count < 4 else 2]]
        count = min(count, 3 * len(stored) - 1)
        method = rollout_replay(group_size=3, exponent=exponent, seed=5)
        run(method, 0, stored)
        magnitudes = [a for group in stored for a in rules.group_relative(group.generated, eps=0, ddof=0)]
        chances = rules.rollout_priorities(magnitudes, [1] * len(magnitudes), 10, alpha=exponent)
        numbers = {name: number for number, name in enumerate(names(stored))}
        draws, seen = 3_000, Counter()
        for _ in range(draws):
            groups, drawn = method.draw(count)
            chosen = [numbers[name] for name in names(groups)]
            assert chosen == sorted(set(chosen)) and len(chosen) == count  # in the order of the store, each once
            assert drawn == pytest.approx(np.abs([magnitudes[number] for number in chosen]), rel=1e-4, abs=1e-9)
            assert len(set(uids(groups))) == len(groups)  # those of one group are together
            seen[frozenset(chosen)] += 1
        expected = rules.draws_without_replacement(chances, count)
        assert sum(expected.values()) == pytest.approx(1)
        for chosen, chance in expected.items():
            spread = math.sqrt(draws * chance * (1 - chance)) + 1
            assert abs(seen[chosen] - draws * chance) < 4.5 * spread

    def test_all_can_be_drawn_however_small_their_chance(self, make_group):
        """(1e-6)^10 of a response without advantage is still above 0."""
        method = rollout_replay(group_size=3, exponent=10.0, replay_share=F(9))
        stored = [make_group([0, 0.5, 1]), make_group([0, 0.5, 1])]
        run(method, 0, stored)
        assert names(method.draw(6)[0]) == names(method.draw(99)[0]) == names(stored)


@settings(derandomize=True, database=None)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=4, max_size=4), st.data())
def test_a_replayed_response_has_the_advantage_of_its_own_group(make_group, rewards, data):
    """Also a response by itself, whose own mean would make it 0."""
    method = rollout_replay(group_size=4, filter="none", seed=data.draw(st.integers(0, 9)))
    stored = make_group(rewards)
    run(method, 0, [stored])
    (group,), drawn = method.draw(data.draw(st.integers(1, 4)))
    expected = advantages(stored)[[place for _, place in names([group])]]
    assert np.array_equal(advantages(group), expected) and np.array_equal(np.abs(expected), drawn)
    if len(set(rewards)) > 1:
        theirs = rules.group_relative(rewards, eps=0, ddof=0)
        assert advantages(stored) == pytest.approx(theirs, rel=1e-4)
    assert (group.mean, group.variance) == (stored.mean, stored.variance)


class TestBatch:
    @pytest.mark.parametrize("share", [F(0), F(1, 5), F(1, 2), F(3, 4), F(5, 4), F(9)])
    @pytest.mark.parametrize("fresh", [0, 1, 3, 6])
    def test_size_is_that_of_the_rules(self, make_group, share, fresh):
        """Of 6 x 5 responses of room and 20 stored; halves are rounded to even, as there."""
        method = rollout_replay(6, group_size=5, replay_share=share)
        run(method, 0, [make_group(2, size=5) for _ in range(4)])
        batch = run(method, 1, [make_group(2, size=5, step=1) for _ in range(fresh)])
        expected = rules.rollout_draw_size(5 * fresh, 20, ratio=share, step=1, warmup=0)
        assert len(names(batch.replayed)) == min(expected, 30 - 5 * fresh)
        assert batch.responses <= 30

    @pytest.mark.parametrize(("responses", "groups"), [(8, 1), (15, 1), (16, 2), (25, 3)])
    def test_the_buffer_is_in_responses(self, make_group, responses, groups):
        """As many whole groups as fit. The oldest leave first."""
        method = rollout_replay(buffer_responses=responses)
        fresh = [make_group(4) for _ in range(4)]
        run(method, 0, fresh)
        assert uids(method.replay) == uids(fresh)[-groups:]

    def test_priorities_have_the_smoothing_of_the_run(self, make_group):
        """With a large --adapt.eps, advantages are smaller: 1/2 over the root of 1/4 + 2."""
        method = rollout_replay(eps=2.0)
        run(method, 0, [make_group(4)])
        assert method.draw(8)[1] == pytest.approx([0.5 / 1.5] * 8)


def test_metrics_by_hand(make_group):
    method = rollout_replay()
    for step in range(2):
        run(method, step, [make_group(4, step=step)])
    assert method.metrics()["drawn/advantage"] == pytest.approx(0.5 / math.sqrt(0.25 + 1e-6))


def test_side_by_side_with_the_rules(make_group):
    """Whole random runs: the rules hold the same responses and draw as many; which ones is the generator's choice."""
    met: Counter[str] = Counter()

    @settings(derandomize=True, database=None)
    @given(st.data())
    def check(data):
        size, capacity = data.draw(st.integers(2, 4)), data.draw(st.integers(7, 12))
        share = data.draw(st.sampled_from([F(1, 2), F(1, 3), F(1), F(3, 4), F(0)]))
        most = size * data.draw(st.integers(1, 9))
        options = {"group_size": size, "replay_share": share, "buffer_responses": most}
        options |= {"oldest": data.draw(st.integers(1, 3)), "warm_up": data.draw(st.integers(0, 3))}
        theirs = rules.RolloutReplay(max_age=options["oldest"], ratio=share, warmup=options["warm_up"], capacity=most)
        method, ledger, held = rollout_replay(capacity, **options), Ledger(), []
        values = st.integers(0, size).map(lambda right: [1.0] * right + [0.0] * (size - right))
        values |= st.lists(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), min_size=size, max_size=size)
        for step in range(data.draw(st.integers(2, 9))):
            fresh = [make_group(rewards, step=step) for rewards in data.draw(st.lists(values, max_size=3))]
            method.begin_step(step)
            batch = method.build_batch(step, fresh, [])
            ledger.settle(fresh, batch)

            asked = []

            def draw(chances, count, asked=asked):
                asked.append(count)
                return range(count)

            mine, _ = theirs.step(step, {group.uid: group.generated for group in fresh}, draw)
            assert names(batch.fresh) == [(uid, place) for uid, _, place in mine]
            assert len(names(batch.replayed)) == (asked[0] if asked else 0)  # the room is never short here
            assert set(names(batch.replayed)) <= set(held)
            assert all(step - group.step <= options["oldest"] for group in batch.replayed)
            held = [(uid, place) for (uid, _, place), _, _ in theirs.stored]
            assert names(method.replay) == held
            signs = [np.sign(advantage) for _, advantage, _ in theirs.stored]
            assert [np.sign(round(a, 9)) for g in method.replay for a in advantages(g)] == signs
            met.update(replayed=len(names(batch.replayed)), lone=sum(g.size == 1 for g in batch.replayed))
            met.update(evicted=method.replay.counts["evicted"], expired=method.replay.counts["expired"])
        ledger.check()

    check()
    assert min(met.values()) > 5 and len(met) == 4, met

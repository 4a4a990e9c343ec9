"""Rollout-level replay: draws against the enumerated chances, and whole runs against the independent rules."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction as F

import numpy as np
import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import places, rewards_of, run, uids

from bapo_openrlhf.methods.rollout_replay import RolloutReplay


def rollout_replay(capacity: int = 8, **options) -> RolloutReplay:
    return RolloutReplay(capacity=capacity, **{"group_size": 8, "warm_up": 0} | options)


def names(groups) -> list[tuple[int, int]]:
    """Each response as the number of its group and its place there."""
    return [(group.uid, place) for group in groups for place in places(group)]


class TestDraw:
    @pytest.mark.parametrize(("exponent", "count"), [(0.5, 2), (2.0, 3), pytest.param(0.0, 2, marks=pytest.mark.slow)])
    def test_frequencies(self, make_group, exponent, count):
        """Which responses, over many draws, against the enumerated chance of every set."""
        rewards = np.array([[1, 0, 0], [0, 1, 1], [0, 0.5, 1]])  # the middle of the last has an advantage of 0
        stored = [make_group(each.tolist()) for each in rewards]
        method = rollout_replay(group_size=3, exponent=exponent, seed=5)
        run(method, 0, stored)
        deviations = rewards - rewards.mean(axis=1, keepdims=True)
        magnitudes = np.abs(deviations / rewards.std(axis=1, keepdims=True)).flatten()
        chances = rules.rollout_priorities(magnitudes.tolist(), alpha=exponent)
        numbers = {name: number for number, name in enumerate(names(stored))}
        draws, seen = 3_000, Counter()
        for _ in range(draws):
            groups, drawn = method.draw(count)
            chosen = [numbers[name] for name in names(groups)]
            assert chosen == sorted(set(chosen)) and len(chosen) == count  # in the order of the store, each once
            assert drawn == pytest.approx(magnitudes[chosen], rel=1e-4, abs=1e-9)
            assert len(set(uids(groups))) == len(groups)  # those of one group are together
            seen[frozenset(chosen)] += 1
        for chosen, chance in rules.draws_without_replacement(chances, count).items():
            spread = math.sqrt(draws * chance * (1 - chance)) + 1
            assert abs(seen[chosen] - draws * chance) < 4.5 * spread

    def test_all_can_be_drawn_however_small_their_chance(self, make_group):
        """(1e-6)^10 of a response without advantage is still above 0."""
        method = rollout_replay(group_size=3, exponent=10.0, replay_share=F(9))
        stored = [make_group([0, 0.5, 1]), make_group([0, 0.5, 1])]
        run(method, 0, stored)
        assert names(method.draw(6)[0]) == names(method.draw(99)[0]) == names(stored)


def test_rewards_that_training_takes_as_equal_have_no_advantage(make_group):
    """With rewards up to 100, 4e-6 is rounding."""
    method = rollout_replay(group_size=2, filter="none")
    run(method, 0, [replace(make_group([0.0, 4e-6]), reward_range=(F(0), F(100)))])
    assert method.draw(2)[1].tolist() == [0.0, 0.0]


def test_priorities_have_the_smoothing_of_the_run(make_group):
    """With a large --adapt.eps, advantages are smaller: 1/2 over the root of 1/4 + 2."""
    method = rollout_replay(eps=2.0)
    for step in range(2):
        run(method, step, [make_group(4, step=step)])
    assert method.metrics()["drawn/advantage"] == pytest.approx(0.5 / 1.5)


def test_side_by_side_with_the_rules(make_group):
    """Whole random runs: the rules hold the same responses and draw as many; which ones is the generator's choice.

    The buffer holds whole groups, as many as fit. A replayed response keeps the advantage of its own group.
    """
    met: Counter[str] = Counter()

    @settings(max_examples=3 * settings.default.max_examples, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        size, capacity = data.draw(st.integers(2, 4)), data.draw(st.integers(3, 5))
        share = data.draw(st.sampled_from([F(1, 2), F(1, 3), F(1), F(3, 4), F(0), F(9), F(9)]))
        most = data.draw(st.integers(size, 9 * size))
        options = {"group_size": size, "replay_share": share, "buffer_responses": most}
        options |= {"oldest": data.draw(st.integers(1, 3)), "warm_up": data.draw(st.integers(0, 3))}
        theirs = rules.RolloutReplay(options["oldest"], share, options["warm_up"], most // size * size)
        method, held, generated = rollout_replay(capacity, **options), [], {}
        for step in range(data.draw(st.integers(2, 9))):
            fresh = [make_group(rewards, step=step) for rewards in data.draw(st.lists(rewards_of(size), max_size=3))]
            batch = run(method, step, fresh)
            mine, replayed = theirs.step(step, {group.uid: group.generated for group in fresh})
            generated |= {group.uid: group.generated for group in fresh}
            assert names(batch.fresh) == mine
            room = capacity * size - len(mine)
            assert len(names(batch.replayed)) == min(replayed, room)
            assert set(names(batch.replayed)) <= set(held)
            assert all(step - group.step <= options["oldest"] for group in batch.replayed)
            for group in batch.replayed:
                assert (group.relative_to, group.generated) == ("generated", generated[group.uid])
            held = [name for name, _ in theirs.stored]
            assert names(method.replay) == held
            met.update(replayed=len(names(batch.replayed)), lone=sum(g.size == 1 for g in batch.replayed))
            met.update(evicted=method.replay.counts["evicted"], expired=method.replay.counts["expired"])
            met.update(no_room=replayed > room)

    check()
    assert min(met.values()) > 5 and len(met) == 5, met

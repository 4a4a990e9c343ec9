"""Freshness-aware replay: priorities and draws against the independent rules, and batches by hand."""

import math
from collections import Counter

import pytest
import reference_rules as rules
from hypothesis import given
from hypothesis import strategies as st
from one_step import rewards_of, run, uids

from bapo_openrlhf.methods.freshness import Freshness


def freshness(capacity: int = 8, **options) -> Freshness:
    return Freshness(capacity=capacity, **{"group_size": 8} | options)


class TestPriority:
    @given(
        rewards=st.lists(st.floats(-8, 8).map(lambda reward: round(reward, 3)), min_size=1, max_size=6),
        born=st.integers(0, 900),
        age=st.integers(0, 900),
        tau=st.floats(1, 2000),
        epsilon=st.sampled_from([1e-6, 0.01, 1.0]),
    )
    def test_is_that_of_the_rules(self, make_group, rewards, born, age, tau, epsilon):
        group = make_group(rewards, step=born, weights_version=max(born - 3, 0))
        size = math.fsum(abs(reward) for reward in rewards) / len(rewards)
        [expected] = rules.freshness_priorities([size], [age], tau, epsilon)
        actual = freshness(tau=tau, epsilon=epsilon).priority(group, born + age)
        assert actual == pytest.approx(max(expected, 1e-8), rel=1e-9)


class TestDraw:
    @pytest.mark.parametrize(
        ("options", "count"),
        [({"tau": 2.0}, 2), pytest.param({"exponent": 0.0, "tau": 1.0}, 3, marks=pytest.mark.slow)],
    )
    def test_frequencies(self, make_group, options, count):
        """Which groups, over many draws: chi-square against the enumerated probabilities of every set."""
        method = freshness(2 * count, seed=5, **options)
        stored = [make_group(right, step=step) for step, right in enumerate((1, 7, 4, 2, 6))]
        for group in stored:
            method.replay.add(group)
        given_ages = [7 - group.step for group in stored]
        sizes = [float(group.mean) for group in stored]
        chances = rules.freshness_probabilities(
            rules.freshness_priorities(sizes, given_ages, method.tau), method.exponent
        )
        places = {group.uid: place for place, group in enumerate(stored)}
        draws, seen = 4_000, Counter()
        for _ in range(draws):
            drawn = uids(method.build_batch(7, [], []).replayed)
            assert drawn == sorted(drawn) and len(drawn) == count
            seen[frozenset(places[uid] for uid in drawn)] += 1
        for chosen, chance in rules.draws_without_replacement(chances, count).items():
            spread = math.sqrt(draws * chance * (1 - chance)) + 1
            assert abs(seen[chosen] - draws * chance) < 4.5 * spread

    def test_nothing_is_rounded_to_zero(self, make_group):
        method = freshness(tau=1e-3, exponent=1.0)
        for step in range(4):
            method.replay.add(make_group(4, step=step))
        assert len(method.build_batch(9999, [], []).replayed) == 4


def test_metrics_by_hand(make_group):
    method = freshness(tau=2.0, buffer_groups=3)
    run(method, 0, [make_group(4), make_group(4)])
    run(method, 3, [make_group(4, step=3), make_group(4, step=3)])
    assert method.metrics()["freshness/stored_mean"] == pytest.approx((math.exp(-1.5) + 2) / 3)


@given(st.data())
def test_sizes_and_store_over_random_runs(make_group, data):
    capacity, most = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 12))
    share = data.draw(st.fractions(0, 1, max_denominator=6))
    options = {"group_size": 4, "replay_share": share, "buffer_groups": most}
    options |= {"tau": data.draw(st.sampled_from([0.01, 1.0, 500.0]))}
    method, known = freshness(capacity, **options), []  # known: informative groups, oldest first
    for step in range(data.draw(st.integers(1, 8))):
        fresh = [make_group(rewards, step=step) for rewards in data.draw(st.lists(rewards_of(4), max_size=8))]
        batch = run(method, step, fresh)
        informative = [group for group in fresh if len(set(group.rewards)) > 1]
        held = uids(known[-most:])
        assert len(batch.fresh) == min(len(informative), capacity)
        free = min(capacity - len(batch.fresh), math.floor(share * capacity))
        assert len(set(uids(batch.replayed))) == len(batch.replayed) == min(free, len(held))
        assert set(uids(batch.replayed)) <= set(held)
        known += informative
        assert uids(method.replay) == uids(known[-most:])

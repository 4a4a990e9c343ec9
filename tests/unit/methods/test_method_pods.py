"""PODS: which responses of a group stay, against all subsets and the authors' scan, and what becomes of the others."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import advantages, places, run, uids

from bapo_openrlhf.adapt.batch import drop
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.pods import PODS, most_varied


def pods(capacity: int = 8, **options) -> PODS:
    return PODS(capacity=capacity, **{"group_size": 8, "keep": 4} | options)


class TestRule:
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    @given(
        rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8)
        | st.lists(st.sampled_from([-1.5, -0.25, 0.0, 0.5, 0.75, 2.0]), min_size=2, max_size=8),
        data=st.data(),
    )
    def test_is_a_best_subset_and_the_one_of_the_scan(self, rewards, data):
        size = data.draw(st.integers(2, len(rewards)))
        chosen = most_varied([F(reward) for reward in rewards], size)
        variance, best = rules.pods_subset(rewards, size)
        assert tuple(chosen) in best  # in order, each once
        kept = [rewards[place] for place in chosen]
        assert float(rules.exact_variance(kept)) == variance
        assert tuple(sorted(kept, reverse=True)) == rules.pods_scan(rewards, size)

    def test_of_equal_rewards_the_first_ones_stay(self):
        """As in the authors' order: the highest are tried first, so the lowest comes last."""
        assert most_varied([F(0), F(1), F(1)], 2) == [0, 1]

    def test_equal_variances_are_compared_without_rounding(self):
        """High, high, low and high, low, low have the same variance. As floats, the second has a larger one."""
        low, high = 0.01, 0.05
        assert np.var([high, low, low]) > np.var([high, high, low])
        assert most_varied([F(str(reward)) for reward in (low, high, low, high)], 3) == [1, 2, 3]


class TestBatch:
    @settings(derandomize=True, database=None)
    @given(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=6, max_size=6), st.integers(2, 6))
    def test_advantages_are_those_of_the_rules(self, make_group, rewards, size):
        """With the population deviation, and Eq. 2's smoothing of the variance."""
        (group,) = run(pods(group_size=6, keep=size, filter="none"), 0, [make_group(rewards)]).fresh
        kept = [rewards[place] for place in places(group)]
        expected = rules.group_relative(kept, eps=0, ddof=0) if len(set(kept)) > 1 else [0.0] * size
        assert len(kept) == size and advantages(group) == pytest.approx(expected, rel=1e-4, abs=1e-6)

    def test_the_filter_sees_all_that_was_generated(self, make_group):
        """A gaussian filter of mean 1/8 keeps what has this mean before the choice; 2 of 4 are kept right below 1/2."""
        method = pods(filter="gaussian", gaussian_mean=0.125, gaussian_std=0.01)
        fresh = [make_group(1), make_group(4)]
        batch = run(method, 0, fresh)
        assert uids(batch.fresh) == [fresh[0].uid] and batch.filtered == [fresh[1]]


def test_a_fourth_of_the_group_stays_by_default():
    """The paper's runs: 16 of 64, 32 of 128."""
    kept = [PODS(capacity=4, group_size=size).kept for size in (2, 8, 11, 12, 64, 128)]
    assert kept == [2, 2, 2, 3, 16, 32]


@settings(derandomize=True, database=None)
@given(st.data())
def test_every_response_is_counted_over_random_runs(make_group, data):
    size = data.draw(st.integers(2, 6))
    keep, capacity = data.draw(st.integers(2, size)), data.draw(st.integers(1, 5))
    method, ledger, met = pods(capacity, group_size=size, keep=keep), Ledger(), Counter()
    values = st.integers(0, size).map(lambda right: [1.0] * right + [0.0] * (size - right))
    values |= st.lists(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), min_size=size, max_size=size)
    for step in range(data.draw(st.integers(1, 5))):
        fresh = [make_group(rewards, step=step) for rewards in data.draw(st.lists(values, max_size=8))]
        batch = method.build_batch(step, fresh, [])
        lost = set(data.draw(st.lists(st.sampled_from(uids(batch.fresh)), max_size=2))) if batch.fresh else set()
        batch = drop(batch, nonfinite=lost)
        ledger.settle(fresh, batch)
        signal = sum(len(set(group.rewards)) > 1 for group in fresh)
        trained = min(signal, capacity * size // keep)
        cut = signal - trained
        assert (len(batch.fresh) + len(batch.nonfinite), len(batch.cut)) == (trained, cut)
        alive = trained - len(lost)
        met.update(fresh=alive * keep, dropped=alive * (size - keep), cut=cut * size, nonfinite=len(lost) * size)
        met.update(filtered=(len(fresh) - signal) * size, generated=len(fresh) * size)
    assert +ledger.responses == +met
    ledger.check()

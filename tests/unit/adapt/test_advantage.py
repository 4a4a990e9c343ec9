"""Eq. 2: group-relative advantages."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.advantage import group_relative_advantages


def slow(rewards: list[float], eps: float) -> list[float]:
    """Eq. 2 of one group, term by term."""
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    return [(reward - mean) / math.sqrt(variance + eps) for reward in rewards]


@given(
    size=st.integers(1, 9),
    eps=st.sampled_from([1e-6, 1e-2, 1.0]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_matches_the_slow_reference_group_by_group(size, eps, data):
    reward = st.floats(-3, 3, allow_nan=False).map(lambda value: round(value, 3))
    groups = data.draw(st.lists(st.lists(reward, min_size=size, max_size=size), min_size=1, max_size=5))
    advantages = group_relative_advantages(np.array(groups), eps)
    assert advantages.shape == (len(groups), size) and advantages.dtype == np.float64
    assert advantages == pytest.approx(np.array([slow(group, eps) for group in groups]), abs=1e-9)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 10])
def test_closed_form_for_k_of_g_right(size):
    for right in range(1, size):
        rewards = np.array([1.0] * right + [0.0] * (size - right))
        advantages = group_relative_advantages(rewards[None], eps=1e-16)[0]
        assert advantages[:right] == pytest.approx(math.sqrt((size - right) / right), rel=1e-12)
        assert advantages[right:] == pytest.approx(-math.sqrt(right / (size - right)), rel=1e-12)


def test_eps_is_added_to_the_variance_under_the_root():
    # mean 1/2, variance 1/4: with eps = 3/4 the denominator is exactly 1
    assert group_relative_advantages(np.array([[1.0, 0.0]]), eps=0.75).tolist() == [[0.5, -0.5]]


def test_default_eps_is_a_millionth():
    expected = 0.5 / math.sqrt(0.25 + 1e-6)
    assert group_relative_advantages(np.array([[1.0, 0.0]]))[0, 0] == pytest.approx(expected, rel=1e-15)
    assert abs(expected - 1.0) > 1e-6


@pytest.mark.parametrize("size", [2, 3, 8])
def test_differs_from_the_sample_deviation_by_its_known_factor(size):
    rewards = [(index * index + 1) / 7 for index in range(size)]
    by_sample = [(reward - statistics.fmean(rewards)) / statistics.stdev(rewards) for reward in rewards]
    advantages = group_relative_advantages(np.array([rewards]), eps=1e-18)[0]
    assert np.array(by_sample) == pytest.approx(math.sqrt((size - 1) / size) * advantages, rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 0.125])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_equal_rewards_give_zeros(value, size):
    assert not group_relative_advantages(np.full((2, size), value)).any()


@pytest.mark.parametrize(("value", "size"), [(0.1, 3), (0.7, 6), (0.3, 10)])
def test_equal_rewards_give_zeros_when_their_mean_is_rounded(value, size):
    assert not group_relative_advantages(np.full((1, size), value)).any()


def test_groups_do_not_mix():
    rewards = np.array([[1, 1, 0, 0], [100, 0, 0, 0], [5, 5, 5, 5]])
    together = group_relative_advantages(rewards)
    for row, group in zip(together, rewards, strict=True):
        assert np.array_equal(row, group_relative_advantages(group[None])[0])


def test_advantages_have_mean_zero_and_variance_just_below_one():
    rewards = np.array([[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.3, 0.9, -1.0, 2.0, 0.0, 0.0, 0.1, 0.7]])
    advantages = group_relative_advantages(rewards)
    assert advantages.mean(axis=1) == pytest.approx(0, abs=1e-12)
    variance = rewards.var(axis=1)
    assert (advantages**2).mean(axis=1) == pytest.approx(variance / (variance + 1e-6), rel=1e-12)


def test_any_number_type_comes_out_as_float64_and_the_input_stays():
    for dtype in (np.int64, np.float32, bool):
        rewards = np.array([[1, 0, 0, 0]], dtype=dtype)
        before = rewards.copy()
        advantages = group_relative_advantages(rewards)
        assert advantages.dtype == np.float64
        assert advantages[0, 0] == pytest.approx(math.sqrt(3), rel=1e-5)
        assert np.array_equal(rewards, before)

"""Eq. 2: group-relative advantages."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS, group_relative_advantages, relative_rewards


def slow(rewards: list[float], baseline: list[float], eps: float) -> list[float]:
    """Eq. 2 of one group, term by term."""
    mean = math.fsum(baseline) / len(baseline)
    variance = math.fsum((reward - mean) ** 2 for reward in baseline) / len(baseline)
    return [(reward - mean) / math.sqrt(variance + eps) for reward in rewards]


def advantages_of(rewards, eps: float = 1e-6) -> np.ndarray:
    """Advantages of a whole group."""
    return group_relative_advantages(np.asarray(rewards), np.asarray(rewards), eps)


REWARD = st.floats(-3, 3, allow_nan=False).map(lambda value: round(value, 3))


@given(baseline=st.lists(REWARD, min_size=1, max_size=9), eps=st.sampled_from([1e-6, 1e-2, 1.0]), data=st.data())
@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
def test_matches_the_slow_reference(baseline, eps, data):
    """Any number of the responses that a group was generated with, from one to all."""
    kept = data.draw(st.lists(st.sampled_from(range(len(baseline))), unique=True, min_size=1))
    rewards = [baseline[position] for position in kept]
    advantages = group_relative_advantages(np.array(rewards), np.array(baseline), eps)
    assert advantages.shape == (len(kept),) and advantages.dtype == np.float64
    assert advantages == pytest.approx(np.array(slow(rewards, baseline, eps)), abs=1e-9)


def test_default_eps_is_a_millionth():
    expected = 0.5 / math.sqrt(0.25 + 1e-6)
    assert advantages_of([1.0, 0.0])[0] == pytest.approx(expected, rel=1e-15)
    assert abs(expected - 1.0) > 1e-6


@pytest.mark.parametrize(("value", "size"), [(0.1, 3), (0.7, 6), (0.3, 10)])
def test_equal_rewards_give_zeros_when_their_mean_is_rounded(value, size):
    assert not advantages_of(np.full(size, value)).any()


def test_any_number_type_comes_out_as_float64_and_the_input_stays():
    for dtype in (np.int64, np.float32, bool):
        rewards = np.array([1, 0, 0, 0], dtype=dtype)
        before = rewards.copy()
        advantages = advantages_of(rewards)
        assert advantages.dtype == np.float64
        assert advantages[0] == pytest.approx(math.sqrt(3), rel=1e-5)
        assert np.array_equal(rewards, before)


@given(
    baseline=st.lists(REWARD, min_size=2, max_size=9),
    estimator=st.sampled_from(["rloo", "dr_grpo", "reinforce_baseline", "gae"]),
    data=st.data(),
)
@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
def test_other_estimators_one_response_at_a_time(baseline, estimator, data):
    kept = data.draw(st.lists(st.sampled_from(range(len(baseline))), unique=True, min_size=1))
    expected = []
    for position in kept:
        others = baseline[:position] + baseline[position + 1 :]
        less = {"rloo": statistics.fmean(others), "gae": 0.0}.get(estimator, statistics.fmean(baseline))
        expected.append(baseline[position] - less)
    actual = relative_rewards(estimator, np.array(baseline)[kept], np.array(baseline))
    assert actual == pytest.approx(np.array(expected), abs=1e-9)


def test_of_one_response_without_others():
    assert relative_rewards("rloo", [0.7], [0.7]).tolist() == [0.0]


def test_group_norm_is_eq_2():
    assert relative_rewards("group_norm", [1.0], [1.0, 0.0], 0.75).tolist() == [0.5]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_rewards_that_differ_only_by_rounding_have_no_advantage(estimator):
    rewards = np.array([1.0, 0.99999994, 1.0, 0.99999994])
    assert relative_rewards(estimator, rewards, rewards, eps=1e-18).tolist() == [0.0] * 4
    kept = relative_rewards(estimator, rewards[:1], np.array([0.99999994, 1.0, 1.0]), eps=1e-18)
    assert kept.tolist() == [0.0]


@pytest.mark.parametrize("estimator", ["reinforce", "flash_reinforce", "grpo", ""])
def test_an_unknown_estimator_is_refused_by_name(estimator):
    with pytest.raises(ValueError, match=f"estimator is '{estimator}'; it must be one of gae, group_norm, dr_grpo"):
        relative_rewards(estimator, np.ones(2), np.ones(2))

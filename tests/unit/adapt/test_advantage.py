"""Eq. 2, group-relative advantages, and OpenRLHF's other estimators."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS, relative_rewards


def slow(estimator: str, baseline: list[float], position: int, eps: float) -> float:
    """What an estimator makes of the reward of one response, term by term."""
    mean = math.fsum(baseline) / len(baseline)
    variance = math.fsum((reward - mean) ** 2 for reward in baseline) / len(baseline)
    others = baseline[:position] + baseline[position + 1 :]
    reward = baseline[position]
    return {
        "group_norm": (reward - mean) / math.sqrt(variance + eps),
        "rloo": reward - statistics.fmean(others) if others else 0.0,
        "dr_grpo": reward - mean,
        "reinforce_baseline": reward - mean,
        "gae": reward,
    }[estimator]


REWARD = st.floats(-3, 3, allow_nan=False).map(lambda value: round(value, 3))


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, "gae"])
@given(baseline=st.lists(REWARD, min_size=1, max_size=9), eps=st.sampled_from([1e-6, 1e-2, 1.0]), data=st.data())
@settings(derandomize=True, database=None)
def test_matches_the_slow_reference(estimator, baseline, eps, data):
    """Any number of the responses that a group was generated with, from one to all."""
    kept = data.draw(st.lists(st.sampled_from(range(len(baseline))), unique=True, min_size=1))
    rewards = [baseline[position] for position in kept]
    advantages = relative_rewards(estimator, np.array(rewards), np.array(baseline), eps)
    assert advantages.shape == (len(kept),) and advantages.dtype == np.float64
    expected = [slow(estimator, baseline, position, eps) for position in kept]
    assert advantages == pytest.approx(np.array(expected), abs=1e-9)


@pytest.mark.parametrize(("value", "size"), [(0.1, 3), (0.7, 6), (0.3, 10)])
def test_equal_rewards_give_zeros_when_their_mean_is_rounded(value, size):
    rewards = np.full(size, value)
    assert not relative_rewards("group_norm", rewards, rewards).any()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_rewards_that_differ_only_by_rounding_have_no_advantage(estimator):
    rewards = np.array([1.0, 0.99999994, 1.0, 0.99999994])
    assert relative_rewards(estimator, rewards, rewards, eps=1e-18).tolist() == [0.0] * 4
    kept = relative_rewards(estimator, rewards[:1], np.array([0.99999994, 1.0, 1.0]), eps=1e-18)
    assert kept.tolist() == [0.0]


def test_an_unknown_estimator_is_refused_by_name():
    with pytest.raises(ValueError, match="estimator is 'grpo'"):
        relative_rewards("grpo", np.ones(2), np.ones(2))

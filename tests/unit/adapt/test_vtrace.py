"""V-trace: Eq. 1 of arXiv 1802.01561 term by term, and GAE on-policy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from reference_rules import by_definition  # noqa: E402

from bapo_openrlhf.adapt.critic import vtrace  # noqa: E402

DISCOUNTS = [(1.0, 1.0), (0.97, 1.0), (1.0, 0.9), (0.9, 0.8), (0.7, 0.0), (0.0, 0.5)]
# A whole turn, padding on both sides, two turns, one token.
MASK = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0]])


def numbers(seed: int = 0, shape: tuple[int, int] = MASK.shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, rewards and log-ratios."""
    return tuple(np.random.Generator(np.random.PCG64(seed)).normal(size=(3, *shape)))


@pytest.mark.parametrize(("gamma", "lambd"), DISCOUNTS)
def test_on_policy_it_is_openrlhfs_gae_to_the_last_bit(gamma, lambd):
    values, rewards, _ = numbers(1)
    result = vtrace(values, rewards, np.zeros(MASK.shape), MASK, gamma=gamma, lambd=lambd)
    theirs = RemoteExperienceMaker.get_advantages_and_returns(
        SimpleNamespace(), torch.tensor(values), torch.tensor(rewards), torch.tensor(MASK), gamma, lambd
    )
    for ours, other in zip(result, theirs, strict=True):
        assert ours.dtype == np.float64
        assert np.array_equal(ours, other.numpy())


@pytest.mark.parametrize(("gamma", "lambd"), DISCOUNTS)
def test_matches_the_double_sum_of_equation_1(gamma, lambd):
    given = numbers(2)
    advantages, targets = vtrace(*given, MASK, gamma=gamma, lambd=lambd)
    for row, mask in enumerate(MASK):
        wanted = by_definition(*(array[row] for array in given), mask, gamma, lambd)
        assert advantages[row] == pytest.approx(wanted[0], rel=1e-12, abs=1e-12)
        assert targets[row] == pytest.approx(wanted[1], rel=1e-12, abs=1e-12)


OPTIONS = {"gamma": 0.9, "lambd": 0.8}


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_at_masked_positions_changes_nothing(junk):
    given = numbers(5)
    changed = tuple(np.where(MASK, array, junk) for array in given)
    with np.errstate(all="raise", under="ignore"):
        for clean, other in zip(vtrace(*given, MASK, **OPTIONS), vtrace(*changed, MASK, **OPTIONS), strict=True):
            assert np.array_equal(clean, other)


def test_large_ratios_are_truncated_before_they_overflow():
    values, rewards, _ = numbers(8, (1, 4))
    extreme = np.array([[1e5, -1e5, math.inf, -math.inf]])
    limits = np.array([[0.0, -math.inf, 0.0, -math.inf]])
    with np.errstate(all="raise", under="ignore"):
        result = vtrace(values, rewards, extreme, np.ones((1, 4)), **OPTIONS)
    for ours, other in zip(result, vtrace(values, rewards, limits, np.ones((1, 4)), **OPTIONS), strict=True):
        assert np.isfinite(ours).all() and np.array_equal(ours, other)

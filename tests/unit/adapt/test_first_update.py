"""Clip, advantages and values by source, against the gradient of OpenRLHF's loss and a slow loop."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from openrlhf.models.loss import PolicyLoss  # noqa: E402

from bapo_openrlhf.adapt.monitor import Clip, SourceTokens, clipped, first_update  # noqa: E402

CLIP = Clip(0.2, 0.3)


@pytest.mark.parametrize("clip", [CLIP, Clip(0.1, 0.1), Clip(0.0, 1.0), Clip(0.3, 0.2, dual=1.5)])
def test_clipped_is_what_has_no_gradient(clip):
    """In OpenRLHF's loss, with log-ratios and advantages of every sign, far from the clip and near it."""
    rng = np.random.Generator(np.random.PCG64(0))
    log_ratios = rng.normal(0.0, 0.5, 1_000)
    advantages = np.where(rng.random(1_000) < 0.1, 0.0, rng.normal(0.0, 1.0, 1_000))
    log_probs = torch.tensor(log_ratios[None], requires_grad=True)
    loss = PolicyLoss(clip.low, clip.high, clip.dual)
    value, *_ = loss(log_probs, torch.zeros_like(log_probs), torch.tensor(advantages[None]), torch.ones(1, 1_000))
    value.backward()
    result = clipped(log_ratios, advantages, clip)
    assert result.tolist() == ((log_probs.grad[0] == 0).numpy() & (advantages != 0)).tolist()
    assert 0 < result.sum() < len(result)


def test_no_ratio_is_too_large():
    log_ratios, advantages = np.array([1e6, -1e6, 1e6]), np.array([1.0, 1.0, -1.0])
    with np.errstate(over="raise"):
        assert clipped(log_ratios, advantages, CLIP).tolist() == [True, False, False]


@given(sizes=st.lists(st.integers(0, 6), min_size=3, max_size=3), critic=st.booleans(), seed=st.integers(0, 10_000))
@settings(derandomize=True, database=None)
def test_the_first_update_matches_a_slow_loop(sizes, critic, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    given, wanted = {}, {}
    for source, size in zip(("fresh", "reevaluated", "replayed"), sizes, strict=True):
        log_ratios, advantages, errors = (rng.normal(0, 1, size).astype(np.float32) for _ in range(3))
        given[source] = SourceTokens(log_ratios, advantages, errors if critic else None)
        if not size:
            continue
        count, total, squares, bias = 0, 0.0, 0.0, 0.0
        for log_ratio, advantage, error in zip(log_ratios, advantages, errors, strict=True):
            ratio = math.exp(log_ratio)
            count += min(max(ratio, 0.8), 1.3) * float(advantage) < ratio * float(advantage)
            total += abs(float(advantage))
            squares += float(error) ** 2
            bias += float(error)
        wanted |= {f"clip/{source}": count / size, f"advantage/{source}_abs": total / size}
        if critic:
            wanted |= {f"value/{source}_error": math.sqrt(squares / size), f"value/{source}_bias": bias / size}
    assert first_update(given, CLIP) == pytest.approx(wanted, rel=1e-6, abs=1e-9)

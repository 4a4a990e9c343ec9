"""Clip, advantages and values by source, against OpenRLHF's own loss, its gradient, and a slow loop."""

from __future__ import annotations

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


def tokens(seed: int, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Log-ratios and advantages of every sign, far from the clip and near it."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.normal(0.0, 0.5, count), np.where(rng.random(count) < 0.1, 0.0, rng.normal(0.0, 1.0, count))


def loss_of(clip: Clip, log_ratios: np.ndarray, advantages: np.ndarray) -> tuple[torch.Tensor, float]:
    """OpenRLHF's loss: the gradient by each token's log-prob, and the share that it calls clipped."""
    log_probs = torch.tensor(log_ratios[None], requires_grad=True)
    loss = PolicyLoss(clip.low, clip.high, clip.dual)
    mask = torch.ones(1, len(log_ratios))
    value, share, *_ = loss(log_probs, torch.zeros_like(log_probs), torch.tensor(advantages[None]), mask)
    value.backward()
    return log_probs.grad[0], float(share)


class TestClipped:
    @pytest.mark.parametrize("clip", [CLIP, Clip(0.1, 0.1), Clip(0.0, 1.0), Clip(0.3, 0.2, dual=1.5)])
    @pytest.mark.parametrize("seed", range(5))
    def test_is_what_has_no_gradient(self, clip, seed):
        log_ratios, advantages = tokens(seed)
        gradient, _ = loss_of(clip, log_ratios, advantages)
        result = clipped(log_ratios, advantages, clip)
        assert result.tolist() == ((gradient == 0).numpy() & (advantages != 0)).tolist()
        assert 0 < result.sum() < len(result)

    @pytest.mark.parametrize("seed", range(5))
    def test_share_is_openrlhfs(self, seed):
        log_ratios, advantages = tokens(seed)
        _, share = loss_of(CLIP, log_ratios, advantages)
        assert clipped(log_ratios, advantages, CLIP).mean() == pytest.approx(share, abs=1e-6)

    def test_no_ratio_is_too_large(self):
        log_ratios, advantages = np.array([1e6, -1e6, 1e6]), np.array([1.0, 1.0, -1.0])
        with np.errstate(over="raise"):
            assert clipped(log_ratios, advantages, CLIP).tolist() == [True, False, False]

    def test_on_policy_nothing_is(self):
        advantages = np.array([-2.0, 0.0, 3.0])
        assert not clipped(np.zeros(3), advantages, Clip(0.0, 0.0)).any()


class TestFirstUpdate:
    @given(sizes=st.lists(st.integers(0, 6), min_size=3, max_size=3), critic=st.booleans(), seed=st.integers(0, 10_000))
    @settings(derandomize=True, database=None)
    def test_matches_a_slow_loop(self, sizes, critic, seed):
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

    def test_of_nothing(self):
        assert first_update({}, CLIP) == {}

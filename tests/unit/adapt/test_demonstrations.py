"""The loss and the advantage of a demonstration, against the formulas of LUFFY (arXiv 2504.14945) and autograd."""

from __future__ import annotations

import numpy as np
import pytest

from bapo_openrlhf.adapt.advantage import relative_rewards
from bapo_openrlhf.adapt.batch import Demonstration
from bapo_openrlhf.adapt.corrections import GAMMA, shaped


def test_shaping_by_hand():
    assert GAMMA == 0.1
    assert shaped(0.1) == pytest.approx(1 / 2) and shaped(0.9) == pytest.approx(0.9) and shaped(0.0) == 0
    assert shaped(np.array([0.3, 0.5]), gamma=0.5) == pytest.approx([3 / 8, 1 / 2])


def test_the_gradient_is_that_of_the_paper():
    """d f(pi) / d theta = gamma / (pi + gamma)^2 d pi / d theta = gamma pi / (pi + gamma)^2 d log pi / d theta."""
    import torch

    log_probs = torch.tensor([-8.0, -3.0, -1.0, -0.01], dtype=torch.double, requires_grad=True)
    shaped(log_probs.exp(), 0.1).sum().backward()
    p = np.exp([-8.0, -3.0, -1.0, -0.01])
    np.testing.assert_allclose(log_probs.grad.numpy(), 0.1 * p / (p + 0.1) ** 2, rtol=1e-12)


def test_the_advantage_is_that_of_the_mixed_group(make_group):
    """7 wrong responses and a right demonstration: mean 1/8, deviation sqrt(1/8 * 7/8)."""
    group = make_group(0, size=7)
    shown = Demonstration.of(group)
    assert (shown.uid, shown.prompt, shown.rewards) == (group.uid, group.prompt, (0.0,) * 7 + (1.0,))
    rewards = np.array(shown.rewards)
    advantage = relative_rewards("group_norm", rewards[-1:], rewards, 0.0)
    assert advantage == pytest.approx([(1 - 1 / 8) / np.sqrt(7 / 64)])

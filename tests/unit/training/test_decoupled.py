"""The objective of each `adapt.ratio`, through the actor's loss, against the papers' formulas in numpy.

pi is the policy that is being trained, prox is today's policy before the update, and alpha generated the sample.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fake_stack import World
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor

from bapo_openrlhf.adapt.arithmetic import MicroBatch
from bapo_openrlhf.training.trainer import experience as experience_module
from bapo_openrlhf.training.trainer.experience import ExperienceMaker
from bapo_openrlhf.training.worker.updates import LossContext, Means, WholeBatchActorTrainer

LOW, HIGH, CAP = 0.2, 0.28, 2.0
# One row a sample: whole, padded, two turns.
MASK = np.array([[1] * 10, [1] * 6 + [0] * 4, [1, 1, 1, 0, 0, 0, 1, 1, 1, 1]] * 4)
ON_POLICY = np.arange(len(MASK)) % 4 == 0


def arguments_of(ratio: str, cap: float = CAP) -> SimpleNamespace:
    """The arguments of a run, as the actor's worker gets them."""
    words = {"adapt.ratio": ratio, "algo.advantage.is_correction_threshold": cap}
    return World.arguments(Path("unused"), words | {"actor.eps_clip_low_high": [LOW, HIGH]})


@pytest.fixture
def policies() -> SimpleNamespace:
    """The log-probs of each token under the three policies, and advantages, as float64."""
    rng = np.random.Generator(np.random.PCG64(0))
    alpha = -rng.exponential(2.0, MASK.shape)
    prox = alpha + rng.normal(0.0, 0.8, MASK.shape)
    pi, advantages = prox + rng.normal(0.0, 0.3, MASK.shape), rng.normal(size=MASK.shape)
    return SimpleNamespace(alpha=alpha, prox=prox, pi=pi, advantages=advantages)


@pytest.fixture
def train_batch(monkeypatch):
    """Runs a batch through the experience maker and the actor's trainer, without models and workers.

    Returns the loss, and its gradient in log pi.
    """
    monkeypatch.setattr(ppo_actor, "NaiveReplayBuffer", lambda *args: None)
    monkeypatch.setattr(experience_module, "set_advantages", lambda *_, **__: None)
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)

    def run(args: SimpleNamespace, policies: SimpleNamespace) -> tuple[float, np.ndarray]:
        log_probs = torch.tensor(policies.pi, requires_grad=True)
        strategy = SimpleNamespace(args=args, ring_attn_group=None)
        rows = zip(*map(torch.tensor, (MASK, policies.prox, policies.alpha, policies.advantages)), strict=True)
        samples = [
            Experience(
                sequences=torch.zeros(1, len(mask) + 1), attention_mask=torch.ones(1, len(mask) + 1),
                action_mask=mask[None], action_log_probs=prox[None], rollout_log_probs=alpha[None],
                advantages=advantages[None], info={},
            )
            for mask, prox, alpha, advantages in rows
        ]  # fmt: skip
        maker = ExperienceMaker(args, None, None, None, kl_ctl=SimpleNamespace(value=0.0), pad=0)
        maker._pass = lambda *_, **__: None
        origins = [
            SimpleNamespace(
                source="fresh" if on else "replayed", on_policy=bool(on), group=SimpleNamespace(uid=0),
                response=SimpleNamespace(extras={}), sample=lambda one=one: one,
            )
            for on, one in zip(ON_POLICY, samples, strict=True)
        ]  # fmt: skip
        experience = Experience.concat_experiences(maker.finish(maker.forward(origins), range(len(MASK))).samples, 0)

        trainer = WholeBatchActorTrainer(strategy, Mock(return_value=(log_probs, None)), None, None, None)
        trainer.means = Means()
        tokens = {"dp_size": 1, "batch_num_tokens": float(MASK.sum()), "global_batch_size": float(len(MASK))}
        part = LossContext(MicroBatch(len(MASK), True, len(MASK), 1), float(MASK.sum()), 1, tokens)
        loss = trainer.loss(experience, part, 0.0)
        loss.backward()
        return loss.item(), log_probs.grad.numpy()

    return run


def clipped(log_ratio: float, advantage: float) -> tuple[float, float]:
    """PPO's min(u A, clip(u) A) of one token for u = exp(log_ratio), and its derivative in log pi."""
    u = math.exp(log_ratio)
    if advantage > 0 and u > 1 + HIGH:
        return (1 + HIGH) * advantage, 0.0
    if advantage < 0 and u < 1 - LOW:
        return (1 - LOW) * advantage, 0.0
    return u * advantage, u * advantage


def objective(policies: SimpleNamespace, log_ratios: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """Minus the mean over tokens of weight * min(u A, clip(u) A), and its gradient in log pi."""
    total, gradient = 0.0, np.zeros(MASK.shape)
    for place in zip(*np.nonzero(MASK), strict=True):
        value, slope = clipped(log_ratios[place], policies.advantages[place])
        total -= weights[place] * value / MASK.sum()
        gradient[place] = -weights[place] * slope / MASK.sum()
    return total, gradient


def same(actual: tuple[float, np.ndarray], wanted: tuple[float, np.ndarray]) -> None:
    assert actual[0] == pytest.approx(wanted[0], rel=1e-12)
    assert actual[1] == pytest.approx(wanted[1], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("cap", [CAP, 1.25])
def test_decoupled_clips_pi_over_prox_and_weighs_by_truncated_prox_over_alpha(train_batch, policies, cap):
    """E[prox/alpha min(u A, clip(u) A)] with u = pi/prox (arXiv 2505.24298); here prox/alpha is at most the cap."""
    weights = np.minimum(np.exp(policies.prox - policies.alpha), cap)
    wanted = objective(policies, policies.pi - policies.prox, weights)
    used = MASK.astype(bool)
    both = zip((weights[used] == cap).tolist(), (wanted[1][used] == 0).tolist(), strict=True)
    assert len({*both}) == 4  # truncated or not, and clipped or not
    same(train_batch(arguments_of("decoupled", cap), policies), wanted)


def test_behaviour_clips_pi_over_alpha(train_batch, policies):
    """Eq. 1 and 3. If today's weights generated the sample, alpha is prox."""
    old = np.where(ON_POLICY[:, None], policies.prox, policies.alpha)
    wanted = objective(policies, policies.pi - old, np.ones(MASK.shape))
    used = wanted[1][MASK.astype(bool)]
    assert (used == 0).any() and (used != 0).any()
    same(train_batch(arguments_of("behaviour"), policies), wanted)


@pytest.mark.parametrize("log_weight", [800.0, -800.0])
def test_weights_beyond_floating_point(train_batch, policies, log_weight):
    policies.alpha = np.where(np.arange(10) == 2, policies.prox - log_weight, policies.alpha)
    weights = np.exp(np.minimum(policies.prox - policies.alpha, math.log(CAP)))
    wanted = objective(policies, policies.pi - policies.prox, weights)
    assert math.isfinite(wanted[0])
    same(train_batch(arguments_of("decoupled"), policies), wanted)

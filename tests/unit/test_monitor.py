"""The theory monitor of a batch, by hand, and a method's batch that the ranks cannot share. No Ray."""

import math
from types import SimpleNamespace

import pytest

from bapo_openrlhf import cpu

cpu.prepare_environment()
cpu.install()

import numpy as np  # noqa: E402

from bapo_openrlhf.adapt.batch import Batch  # noqa: E402
from bapo_openrlhf.arithmetic import BatchArithmetic  # noqa: E402
from bapo_openrlhf.integration.trainer import AdaptedPPOTrainer  # noqa: E402


@pytest.fixture
def trainer():
    """A trainer with only what the monitor reads."""
    made = object.__new__(AdaptedPPOTrainer)
    made.args = SimpleNamespace(adapt=SimpleNamespace(eps=1e-12))
    made.method = SimpleNamespace(constants=lambda: (1.0, 2.0, 3.0))
    return made


def test_metrics_by_source(trainer, make_group):
    """Two fresh groups of 2 and one replayed group of 2, each with one right response: advantages are +1 and -1."""
    batch = Batch(
        fresh=[make_group(1, size=2), make_group(1, size=2)],
        replayed=[make_group(1, size=2)],
    )
    ratios = np.array([1.0, 1.0, 2.0, 0.5, 3.0, 0.25])
    trainer.experience_maker = SimpleNamespace(log_ratios=np.log(ratios))
    found = trainer._off_policy_metrics(batch)
    rewards = [[float(reward) for reward in group.rewards] for group in batch.fresh + batch.replayed]
    signs = [1.0 if reward else -1.0 for row in rewards for reward in row]
    tv = [max(0.0, 1.0 - ratio) for ratio in ratios]
    surrogate = [ratio * sign for ratio, sign in zip(ratios, signs, strict=True)]

    def mean(values):
        return sum(values) / len(values)

    assert found["tv/fresh"] == pytest.approx(mean(tv[:4]))
    assert found["tv/replayed"] == pytest.approx(mean(tv[4:]))
    assert found["importance/fresh_mean"] == pytest.approx(mean(ratios[:4]))
    # L_i = surrogate - 2 K_i TV - 2 TV, with K1 = 1 and K3 = 3
    assert found["theory/bound_fresh"] == pytest.approx(mean(surrogate[:4]) - 4 * mean(tv[:4]))
    assert found["theory/bound_replayed"] == pytest.approx(mean(surrogate[4:]) - 8 * mean(tv[4:]))
    assert (found["theory/k1"], found["theory/k2"], found["theory/k3"]) == (1.0, 2.0, 3.0)
    assert "tv/reevaluated" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_a_batch_that_the_ranks_cannot_share_is_an_error(trainer, make_group):
    trainer.step, trainer.engine_step = 0, 0
    trainer.arithmetic = BatchArithmetic(
        group_size=2, capacity=4, rollout_groups=4, train_batch=8, ranks={"actor": 2}, micro_train=2, micro_rollout=2
    )
    trainer.method = SimpleNamespace(
        begin_step=lambda step: [], build_batch=lambda *_: Batch(fresh=[make_group(1, size=2)])
    )
    trainer._groups = lambda samples, policy_step: []
    with pytest.raises(ValueError, match="batch of 1 groups; the ranks can share multiples of 2"):
        trainer.train_step([], 0)

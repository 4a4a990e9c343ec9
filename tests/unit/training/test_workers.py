"""The workers' own part: losses that are not finite, and generators of random numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from openrlhf.trainer.ray import ppo_actor, ppo_critic  # noqa: E402

from bapo_openrlhf.training import workers  # noqa: E402


class TestFiniteLoss:
    """A loss that is no number stops the run before its gradient is made."""

    @pytest.fixture(params=["actor", "critic"])
    def made(self, request, monkeypatch):
        """The backward pass of a worker's trainer, and what arrives at DeepSpeed's."""
        calls = []
        strategy = SimpleNamespace(
            backward=lambda *args, **kwargs: calls.append((args, kwargs)),
            args=SimpleNamespace(adapt=SimpleNamespace(kl_target="reference")),
        )
        module, kind = {
            "actor": (ppo_actor.ActorPPOTrainer, workers.WholeBatchActorTrainer),
            "critic": (ppo_critic.CriticPPOTrainer, workers.WholeBatchCriticTrainer),
        }[request.param]
        monkeypatch.setattr(
            module,
            "__init__",
            lambda self, strategy, *_, **__: vars(self).update(strategy=strategy, actor_loss_fn=None),
        )
        return kind(strategy), calls

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_raises_before_the_backward_pass(self, made, value):
        worker, calls = made
        with pytest.raises(FloatingPointError) as error:
            worker.strategy.backward(torch.tensor(value), "model", "optimizer")
        assert str(error.value) == f"the loss of {type(worker).__name__} is {value}; its gradient was not applied"
        assert calls == []

    @pytest.mark.parametrize("value", [0.0, -1.5, 3e38])
    def test_passes_a_finite_one_on(self, made, value):
        worker, calls = made
        loss = torch.tensor(value, requires_grad=True)
        worker.strategy.backward(loss, "model", "optimizer", scale=2)
        (((found, *rest), kwargs),) = calls
        assert found is loss and rest == ["model", "optimizer"] and kwargs == {"scale": 2}

    def test_what_came_before_is_done(self, made):
        worker, calls = made
        worker.strategy.backward(torch.tensor(1.0), "model", "optimizer")
        with pytest.raises(FloatingPointError):
            worker.strategy.backward(torch.tensor(math.nan), "model", "optimizer")
        assert len(calls) == 1


class TestWorkerGenerators:
    @pytest.mark.parametrize("kind", [workers.PolicyWorker, workers.CriticWorker])
    def test_shuffle_as_they_would_have(self, kind):
        worker = object.__new__(kind)
        torch.manual_seed(5)
        saved = worker.rng_state()
        wanted = torch.randperm(50).tolist()
        torch.manual_seed(6)
        worker.set_rng_state(saved)
        assert torch.randperm(50).tolist() == wanted
        worker.set_rng_state(saved)
        assert torch.randperm(50).tolist() == wanted  # the state that was saved is not used up
        assert len(saved) == 1 or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("passes", "frozen", "wanted"), [(0, -1, 100), (0, 3, 100), (2, -1, 112), (2, 0, 112), (2, 2, 136)]
)
def test_the_critics_schedule_spans_its_pretraining(monkeypatch, passes, frozen, wanted):
    """Each pass over 5 x 4 responses in optimizer steps of 8 has 3 of them, and there are 2 epochs."""
    args = SimpleNamespace(
        adapt=SimpleNamespace(value_pretraining=passes),
        critic=SimpleNamespace(freezing_steps=frozen),
        rollout=SimpleNamespace(batch_size=5, n_samples_per_prompt=4),
        train=SimpleNamespace(batch_size=8, max_epochs=2),
    )
    seen = []
    monkeypatch.setattr(workers.CRITIC, "init_model_from_pretrained", lambda self, *given: seen.append(given))
    monkeypatch.setattr(workers.CriticWorker, "_require_trainer", lambda *_: None)
    strategy = SimpleNamespace(args=args)
    object.__new__(workers.CriticWorker).init_model_from_pretrained(strategy, "model", 100)
    assert seen == [(strategy, "model", wanted)]

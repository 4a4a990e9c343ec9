"""The workers' own part: generators of random numbers, and the critic's schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402

from bapo_openrlhf.training import workers  # noqa: E402


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

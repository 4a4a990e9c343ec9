"""Gradients of the probe, against sums of A grad log p that are computed sample by sample."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.training.worker.gradients import policy_gradient, probe_gradients

WORDS, WIDTH = 7, 5


class Bigrams(torch.nn.Module):
    """A model whose next token depends only on the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Embedding(WORDS, WIDTH)
        self.outer = torch.nn.Linear(WIDTH, WORDS)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, sequences):
        return torch.log_softmax(self.outer(self.dropout(self.inner(sequences[:, :-1]))), -1)


class Engine(torch.nn.Module):
    """DeepSpeed's engine, which the probe must not use: it would gather gradients."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, sequences):
        raise AssertionError("the engine was called")


class Actor(torch.nn.Module):
    """As OpenRLHF's actor: it has the engine, and turns what the model says into log-probs of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Engine(Bigrams())

    def forward(self, sequences, action_mask, attention_mask=None):
        return self.model(sequences).gather(-1, sequences[:, 1:, None]).squeeze(-1)


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    args = SimpleNamespace(train=SimpleNamespace(micro_batch_size=2), adapt=SimpleNamespace(veto_ratio=None))
    created = SimpleNamespace(actor=Actor(), args=args, tokenizer=SimpleNamespace(pad_token_id=0))
    created.actor_loss_fn = PolicyLoss(0.2, 0.28)
    return created


def samples(trainer, count: int, *, seed: int, moved: float = 0.0) -> list[Experience]:
    """Samples of several lengths. `moved` is the log of the ratio between today's policy and the old one."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        length = int(rng.integers(4, 8))
        sequences = torch.from_numpy(rng.integers(1, WORDS, size=(1, length)))
        mask = torch.ones(1, length - 1)
        mask[:, :2] = 0  # the prompt
        model = trainer.actor.model.module.eval()
        with torch.no_grad():
            old = model(sequences).gather(-1, sequences[:, 1:, None]).squeeze(-1) - moved
        model.train()
        result.append(Experience(sequences=sequences, attention_mask=torch.ones(1, length), action_mask=mask,
                               action_log_probs=old, rollout_log_probs=old,
                               advantages=torch.full_like(old, float(rng.normal())) * mask))  # fmt: skip
    return result


def by_hand(actor, rows, ratio: float = 1.0) -> np.ndarray:
    """- sum of ratio A grad log p over the tokens: softmax and bigram tables in numpy, no automatic gradients."""
    model = actor.model.module
    parameters = model.inner.weight, model.outer.weight, model.outer.bias
    table, weight, bias = (parameter.detach().double().numpy() for parameter in parameters)
    of_table, of_weight, of_bias = np.zeros_like(table), np.zeros_like(weight), np.zeros_like(bias)
    for row in rows:
        ids = row.sequences[0].tolist()
        for place, (last, word) in enumerate(itertools.pairwise(ids)):
            advantage = float(row.advantages[0, place]) * float(row.action_mask[0, place])
            chances = np.exp(table[last] @ weight.T + bias)
            of_logits = -(chances / chances.sum())
            of_logits[word] += 1
            of_logits *= -ratio * advantage
            of_table[last] += of_logits @ weight
            of_weight += np.outer(of_logits, table[last])
            of_bias += of_logits
    return np.concatenate([np.zeros(3), of_table.ravel(), of_weight.ravel(), of_bias])  # the unused parameter is first


@pytest.mark.parametrize(("count", "ratio"), [(1, 1.0), (5, 1.0), (4, 1.1)])
def test_it_is_the_sum_over_tokens_with_their_ratio(trainer, count, ratio):
    rows = samples(trainer, count, seed=count, moved=math.log(ratio))
    result = policy_gradient(trainer, rows)
    np.testing.assert_allclose(result.numpy(), by_hand(trainer.actor, rows, ratio), atol=1e-5)
    assert all(parameter.grad is None for parameter in trainer.actor.parameters()) and trainer.actor.training


def test_above_the_clip_nothing_pulls_up_any_more(trainer):
    far = samples(trainer, 4, seed=3, moved=math.log(2.0))
    for row in far:
        row.advantages = row.advantages.abs()
    assert not policy_gradient(trainer, far).any()


def test_cosines_and_norms_of_groups_sources_and_halves(trainer):
    reference = {half: samples(trainer, 6, seed=10 + half) for half in (0, 1)}
    groups = {7: samples(trainer, 3, seed=20), 9: samples(trainer, 2, seed=21), 8: samples(trainer, 2, seed=22)}
    for row in groups[8]:
        row.advantages = row.advantages * 0
    sources = {7: "fresh", 9: "fresh", 8: "replayed"}
    actual = probe_gradients(trainer, reference, groups, sources)
    halves = [by_hand(trainer.actor, reference[half]) for half in (0, 1)]
    gradients = {uid: by_hand(trainer.actor, rows) for uid, rows in groups.items()}

    def angle(one, other):
        return one @ other / np.linalg.norm(one) / np.linalg.norm(other)

    whole, fresh = halves[0] + halves[1], gradients[7] + gradients[9]
    wanted = {
        "halves": (angle(*halves), np.linalg.norm(whole)),
        7: (angle(gradients[7], whole), np.linalg.norm(gradients[7])),
        9: (angle(gradients[9], whole), np.linalg.norm(gradients[9])),
        "fresh": (angle(fresh, whole), np.linalg.norm(fresh)),
    }
    wanted |= dict.fromkeys((8, "replayed"), (math.nan, 0))
    assert actual.keys() == wanted.keys()
    for key, numbers in wanted.items():
        assert actual[key] == pytest.approx(numbers, rel=1e-3, nan_ok=True), key

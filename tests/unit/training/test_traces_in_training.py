"""The loss of another model's responses and fine-tuning on them: OpenRLHF's own code around it, against brute force."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from openrlhf.models import PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import (  # noqa: E402
    Experience,
    balance_experiences,
    make_experience_batch,
)
from openrlhf.trainer.ray import ppo_actor  # noqa: E402
from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy  # noqa: E402

from bapo_openrlhf.adapt.arithmetic import MicroBatch  # noqa: E402
from bapo_openrlhf.adapt.group import Prompt, Response  # noqa: E402
from bapo_openrlhf.adapt.traces import external_response, shaped  # noqa: E402
from bapo_openrlhf.training import whole_batch  # noqa: E402
from bapo_openrlhf.training.dealing import WIDE, filler_of, packed, shares, unpacked  # noqa: E402
from bapo_openrlhf.training.samples import EXTERNAL, response_of, sample_of, samples_of  # noqa: E402
from bapo_openrlhf.training.whole_batch import WholeBatchReplayBuffer  # noqa: E402
from bapo_openrlhf.training.workers import MixedLoss, WholeBatchActorTrainer  # noqa: E402

EXTRAS = {
    "info": {"reward": 0.0, "score": 0.0, "response_clip_ratio": True, "digits": 3.0},
    "score": 0.0,
    "truncated": True,
    "mm_train_inputs": None,
}


def mixed_group(make_group, traces=1, size=4, tokens=5):
    """A group whose last `traces` responses are another model's, of two tokens more than the others."""
    group = make_group([0.0] * size, extras=EXTRAS, response_tokens=tokens)
    own, others = group.responses[: size - traces], group.responses[size - traces :]
    trace = np.arange(30, 32 + tokens)
    return replace(group, responses=(*own, *(external_response(trace, other, 1.0) for other in others)))


# --- samples ----------------------------------------------------------------------------------------------------------


class TestSamples:
    def test_a_trace_looks_as_if_the_policy_had_generated_it(self):
        """Against OpenRLHF's own sample of the same tokens, by `response_of` and field by field."""
        from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

        def made(tokens, reward, truncated):
            return SamplesGenerator._process_response_into_experience(
                None,
                {
                    "prompt": "p", "label": "l", "images": None, "mm_train_inputs": None,
                    "observation_tokens": [7, 8, *tokens], "action_ranges": [(2, 2 + len(tokens))],
                    "rollout_log_probs": [0.0] * (2 + len(tokens)), "truncated": truncated,
                    "reward": reward, "scores": reward, "extra_logs": {"digits": 4.0},
                },
                max_len=64,
            )  # fmt: skip

        place = response_of(made([5, 5, 5], 0.0, True))
        found = sample_of(Prompt("p", "l"), external_response(np.array([9, 10, 11, 2]), place, 1.0))
        wanted = made([9, 10, 11, 2], 1.0, False)
        for name, value in vars(wanted).items():
            mine = getattr(found, name)
            if isinstance(value, torch.Tensor):
                mine = mine.long() if name in WIDE else mine  # narrower in the trainer
                assert torch.equal(mine, value) and mine.dtype == value.dtype, name
            elif name == "info":
                assert list(mine) == list(value)
                assert all(torch.equal(mine[key], value[key]) and mine[key].dtype == value[key].dtype for key in value)
            else:
                assert mine == value, name

    def test_no_mark_where_there_is_no_trace(self, make_group):
        group = make_group([0.0, 1.0], extras=EXTRAS)
        assert all(EXTERNAL not in sample.info for sample in samples_of([group]))

    @pytest.mark.parametrize("ranks", [1, 2, 5])
    @pytest.mark.parametrize("way", ["concatenated", "balanced"])
    def test_marks_reach_the_training_step(self, make_group, way, ranks):
        """Through OpenRLHF's concatenation and its balancing of dynamic batches, the ranks' buffers and the collation.

        A filler counts as one that the policy generated.
        """
        samples = samples_of([mixed_group(make_group), mixed_group(make_group, traces=0), mixed_group(make_group, 2)])
        assert [float(s.info[EXTERNAL]) for s in samples] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]
        batches = [Experience.concat_experiences(samples[at : at + 5], 0) for at in (0, 5, 10)]
        if way == "balanced":
            actor = SimpleNamespace(num_nodes=1, num_gpus_per_node=2)
            args = SimpleNamespace(actor=actor, ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1))
            batches = balance_experiences(batches, args)
        reached = 0
        for share in unpacked(packed(list(shares(batches, ranks)))):
            buffer = WholeBatchReplayBuffer(1)
            buffer.take(*share["experience"], *share["filler"], len(samples))
            reached += len(buffer.items)
            for items in (buffer.items, [*buffer.items, buffer.filler]):
                for size in (1, 3):
                    for at in range(0, len(items), size):
                        experience = make_experience_batch(items[at : at + size])
                        marks = [bool(mark) for mark in experience.info[EXTERNAL]]
                        assert marks == [30 in row.tolist() for row in experience.sequences]
        assert reached == 12


# --- the loss ---------------------------------------------------------------------------------------------------------


def numbers(rows: int, length: int, seed: int):
    """log-probs of today and of before, those of the engine, advantages, mask."""
    rng = torch.Generator().manual_seed(seed)
    log_probs = -3 * torch.rand((rows, length), generator=rng, dtype=torch.float64)
    old = log_probs + 0.5 * torch.randn((rows, length), generator=rng, dtype=torch.float64)
    rollout = old + 0.1 * torch.randn((rows, length), generator=rng, dtype=torch.float64)
    advantages = torch.randn((rows, 1), generator=rng, dtype=torch.float64).expand(rows, length)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=rng)
    return log_probs, old, rollout, advantages, (torch.arange(length) < lengths).long()


KINDS = [
    {},
    {"dual_clip": 3.0},
    {"token_level_loss": False},
    {"policy_loss_type": "gspo"},
    {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.0, 2.0]},
]


def brute_force(kind, log_probs, old, rollout, advantages, mask, external, gamma, tokens, samples, ranks):
    """Token by token, in plain Python numbers of torch."""
    low, high = 0.2, 0.3
    total = 0.0
    for row in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[row, t]]
        terms = []
        mean_ratio = torch.stack([log_probs[row, t] - old[row, t] for t in places]).mean().exp()
        for t in places:
            a = advantages[row, t]
            if external[row]:
                p = log_probs[row, t].exp()
                terms.append(-p / (p + gamma) * a)
                continue
            ratio = mean_ratio if kind.get("policy_loss_type") == "gspo" else (log_probs[row, t] - old[row, t]).exp()
            term = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
            if kind.get("dual_clip") and a < 0:
                term = torch.maximum(term, kind["dual_clip"] * a)
            weight = 1.0
            if kind.get("is_correction_level"):
                weight = min(math.exp(old[row, t] - rollout[row, t]), 2.0)
            terms.append(-weight * term)
        by_sample = not kind.get("token_level_loss", True) or "policy_loss_type" in kind
        total = total + (sum(terms) / len(places) / samples if by_sample else sum(terms) / tokens)
    return total * ranks


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("marks", [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], ids=str)
def test_loss_and_gradient(kind, marks):
    log_probs, old, rollout, advantages, mask = numbers(4, 6, seed=len(str(kind)) + sum(marks))
    log_probs.requires_grad_()
    plain = PolicyLoss(0.2, 0.3, **kind)
    external = torch.tensor(marks, dtype=torch.bool)
    # normalised over an optimizer step of two such micro-batches on three ranks, half of it each: as OpenRLHF has it
    info = {"dp_size": 3, "batch_num_tokens": torch.tensor(41.0), "global_batch_size": torch.tensor(12.0)}
    found, *others = MixedLoss(plain, external, 0.1)(
        log_probs, old, advantages, action_mask=mask, rollout_log_probs=rollout, **info
    )
    (gradient,) = torch.autograd.grad(found, log_probs)
    wanted = brute_force(kind, log_probs, old, rollout, advantages, mask, external, 0.1, 41, 12, 3)
    (wanted_gradient,) = torch.autograd.grad(wanted, log_probs)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert torch.allclose(gradient, wanted_gradient, rtol=1e-5, atol=1e-9)
    assert all(number is None or torch.isfinite(number) for number in others)


def test_where_nothing_is_external_it_is_openrlhfs():
    log_probs, old, rollout, advantages, mask = numbers(3, 5, seed=1)
    plain = PolicyLoss(0.2, 0.2)
    info = {"dp_size": 1, "batch_num_tokens": torch.tensor(9.0), "global_batch_size": torch.tensor(3.0)}
    given_ = {"action_mask": mask, "rollout_log_probs": rollout, **info}
    found = MixedLoss(plain, torch.zeros(3, dtype=torch.bool), 0.1)(log_probs, old, advantages, **given_)
    wanted = plain(log_probs, old, advantages, **given_)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None and theirs is None) or float(mine) == pytest.approx(float(theirs), rel=1e-6)


def test_numbers_of_the_log_count_a_trace_as_unclipped_and_unmoved():
    """Two own tokens, one of which is clipped, and two of a trace: a quarter of all is clipped."""
    log_probs = torch.tensor([[0.0, -0.5], [-5.0, -0.1]])
    old = torch.tensor([[-1.0, -0.5], [0.0, 0.0]])
    mask = torch.ones(2, 2, dtype=torch.long)
    info = {"dp_size": 1, "batch_num_tokens": torch.tensor(4.0), "global_batch_size": torch.tensor(2.0)}
    loss = MixedLoss(PolicyLoss(0.2, 0.2), torch.tensor([False, True]), 0.1)
    _, clipped, moved, *_ = loss(log_probs, old, torch.ones(2, 2), action_mask=mask, rollout_log_probs=None, **info)
    assert float(clipped) == 0.25 and float(moved) == pytest.approx(-1.0 / 4)
    loss = MixedLoss(PolicyLoss(0.2, 0.2), torch.tensor([True, True]), 0.1)
    _, clipped, moved, *_ = loss(log_probs, old, torch.ones(2, 2), action_mask=mask, rollout_log_probs=None, **info)
    assert float(clipped) == float(moved) == 0.0


@given(st.lists(st.floats(-40, 0), min_size=1, max_size=8), st.floats(0.01, 3))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_the_shaping_is_that_of_the_pure_layer(logs, gamma):
    log_probs = torch.tensor([logs], dtype=torch.float64)
    ones = torch.ones_like(log_probs)
    info = {"dp_size": 1, "batch_num_tokens": torch.tensor(1.0), "global_batch_size": torch.tensor(1.0)}
    found, *_ = MixedLoss(PolicyLoss(), torch.tensor([True]), gamma)(
        log_probs, 0 * ones, ones, action_mask=ones.long(), rollout_log_probs=None, **info
    )
    assert float(found) == pytest.approx(-shaped(np.exp(logs), gamma).sum(), rel=1e-6)


def test_an_actor_that_was_not_told_how_to_shape_refuses():
    with pytest.raises(RuntimeError, match="the actor was not told how to shape"):
        MixedLoss(PolicyLoss(), torch.tensor([True]), None)


class TestTrainingStep:
    """Which loss OpenRLHF's training step finds."""

    def trainer(self, monkeypatch, seen):
        def step(self, experience, *_):
            seen.append(self.actor_loss_fn)
            if experience.info.get("fails"):
                raise ValueError("in the step")
            return {"metrics": {}, "weights": {}}

        monkeypatch.setattr(ppo_actor.ActorPPOTrainer, "training_step", step)
        trainer = object.__new__(WholeBatchActorTrainer)
        trainer.actor_loss_fn = trainer.plain_loss = PolicyLoss()
        trainer.shaping = 0.3
        trainer.actor = SimpleNamespace(model=SimpleNamespace(set_gradient_accumulation_boundary=lambda last: None))
        trainer.args = SimpleNamespace(
            actor=SimpleNamespace(aux_loss_coef=0.0),
            algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
            train=SimpleNamespace(dynamic_batch_enable=False),
        )
        mesh = {"dp": SimpleNamespace(get_group=lambda: None)}
        trainer.strategy = SimpleNamespace(time_steps={}, accumulated_gradient=2, ds_device_mesh=mesh)
        trainer.replay_buffer = SimpleNamespace(plan=[MicroBatch(2, False, 4, 2), MicroBatch(2, True, 4, 2)])
        monkeypatch.setattr(whole_batch.dist, "get_world_size", lambda group: 1)
        return trainer

    def test_a_marked_batch_has_the_mixed_one_and_the_next_the_plain_one(self, monkeypatch):
        seen = []
        trainer = self.trainer(monkeypatch, seen)
        mask = torch.ones(2, 3)
        marked = Experience(action_mask=mask, info={EXTERNAL: [torch.tensor(0.0), torch.tensor(1.0)]})
        trainer.training_step(marked, 0.0, 0)
        trainer.training_step(Experience(action_mask=mask, info={}), 0.0, 1)
        assert isinstance(seen[0], MixedLoss) and seen[0].plain is trainer.plain_loss and seen[0].gamma == 0.3
        assert seen[0].external.flatten().tolist() == [False, True]
        assert seen[1] is trainer.plain_loss is trainer.actor_loss_fn

    def test_also_after_a_failure(self, monkeypatch):
        trainer = self.trainer(monkeypatch, [])
        marked = Experience(action_mask=torch.ones(1, 3), info={EXTERNAL: [torch.tensor(1.0)], "fails": True})
        with pytest.raises(ValueError, match="in the step"):
            trainer.training_step(marked, 0.0, 0)
        assert trainer.actor_loss_fn is trainer.plain_loss


# --- fine-tuning ------------------------------------------------------------------------------------------------------


class TinyActor(torch.nn.Module):
    """A table of next-token logits, called as OpenRLHF's actor is; `model` is the DeepSpeed engine of one rank."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).double())
        self.boundaries: list[bool] = []
        self.model = SimpleNamespace(
            gradient_accumulation_steps=lambda: steps,
            set_gradient_accumulation_boundary=self.boundaries.append,
        )

    def forward(self, sequences, action_mask, attention_mask=None, ring_attn_group=None):
        logits = self.table[sequences[:, :-1]].log_softmax(-1)
        log_probs = logits.gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)
        return log_probs[:, -action_mask.shape[1] :] * action_mask


def rank_trainer(actor: TinyActor, steps: int = 4):
    """This project's actor trainer on one rank; DeepSpeed divides each loss by its accumulation steps."""
    optimizer = torch.optim.AdamW([actor.table], lr=0.01)

    def optimizer_step(*_, **__):
        if actor.boundaries[-1]:
            optimizer.step()
            optimizer.zero_grad()

    trainer = object.__new__(WholeBatchActorTrainer)
    trainer.actor, trainer.actor_optim, trainer.actor_scheduler, trainer.ema_model = actor, optimizer, None, None
    trainer.strategy = SimpleNamespace(
        ring_attn_group=None,
        backward=lambda loss, *_: (loss / steps).backward(),
        optimizer_step=optimizer_step,
    )
    return trainer


def demonstrations(count: int, seed: int = 0):
    """Samples of prompts and traces of different lengths."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        place = Response(rng.integers(3, 60, 4), ((3, 4),), [0.0], 0.0, EXTRAS)
        samples.append(
            sample_of(Prompt("p", "l"), external_response(rng.integers(3, 60, rng.integers(1, 6)), place, 1))
        )
    return samples


def cross_entropy(table, samples):
    """The mean over all response tokens of -log pi, one token after the other."""
    terms = []
    for sample in samples:
        tokens = sample.sequences[0].tolist()
        for place, counts in enumerate(sample.action_mask[0].tolist(), 1):
            if counts:
                terms.append(-table[tokens[place - 1]].log_softmax(-1)[tokens[place]])
    return torch.stack(terms).mean(), len(terms)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


@pytest.mark.parametrize("micro", [1, 2, 7])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_one_step_of_adamw_by_hand(micro, weight):
    samples = demonstrations(7)
    actor = TinyActor()
    table = copy.deepcopy(actor.table)
    loss, tokens = cross_entropy(table, samples)
    optimizer = torch.optim.AdamW([table], lr=0.01)
    (weight * loss).backward()
    optimizer.step()

    batches = [Experience.concat_experiences(samples[at : at + micro], 0) for at in range(0, 7, micro)]
    found = rank_trainer(actor).finetune(batches, tokens, 1, weight)
    assert found == pytest.approx(loss.item(), rel=1e-6)  # without the weight
    assert torch.allclose(actor.table, table, rtol=1e-9, atol=1e-12)
    assert actor.boundaries == [False] * (len(batches) - 1) + [True]


def test_gradients_of_the_ranks_average_to_that_of_all():
    """Three ranks, the last of which has a filler; DeepSpeed averages their gradients."""
    samples = demonstrations(5, seed=2)
    filler = filler_of(samples[3])
    table = TinyActor().table
    loss, tokens = cross_entropy(table, samples)
    (wanted,) = torch.autograd.grad(0.5 * loss, table)
    gradients, parts = [], []
    for rank in range(3):
        actor = TinyActor()
        trainer = rank_trainer(actor)
        trainer.strategy.optimizer_step = lambda *_, **__: None
        mine = [*samples, filler][2 * rank : 2 * rank + 2]
        parts.append(trainer.finetune([Experience.concat_experiences([one], 0) for one in mine], tokens, 3, 0.5))
        gradients.append(actor.table.grad)
    assert torch.allclose(sum(gradients) / 3, wanted, rtol=1e-9, atol=1e-12)
    assert sum(parts) == pytest.approx(float(loss))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("count", range(5))
def test_the_moving_average_of_the_weights_moves_once(count, dynamic):
    """By OpenRLHF's own rule: it averages at multiples of its gradient accumulation, which is 4."""
    actor, average, moved = TinyActor(), TinyActor(), []
    before = average.table.data.clone()
    trainer = rank_trainer(actor)
    trainer.ema_model, trainer.ema_beta, strategy = average, 0.9, trainer.strategy
    strategy.time_steps, strategy.accumulated_gradient = {"ema": count}, 4
    strategy.use_dynamic_batch, strategy.stage = dynamic, 2

    def moving_average(model, ema_model, beta, device):
        moved.append((model, ema_model, beta, device))
        DeepspeedStrategy.moving_average(strategy, model, ema_model, beta, "cpu")

    strategy.moving_average = moving_average
    samples = demonstrations(4)
    trainer.finetune([Experience.concat_experiences([one], 0) for one in samples], 9, 1, 1.0)
    assert moved == [(actor, average, 0.9, "cuda")]
    assert torch.allclose(average.table.data, 0.9 * before + 0.1 * actor.table.data, rtol=1e-12)
    assert not torch.equal(average.table.data, before)

"""The loss of another model's responses and fine-tuning on them: OpenRLHF's own code around it, against brute force."""

from __future__ import annotations

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

from bapo_openrlhf.adapt.arithmetic import MicroBatch  # noqa: E402
from bapo_openrlhf.adapt.group import Prompt  # noqa: E402
from bapo_openrlhf.adapt.traces import external_response, shaped  # noqa: E402
from bapo_openrlhf.training import whole_batch  # noqa: E402
from bapo_openrlhf.training.dealing import WIDE, packed, shares, unpacked  # noqa: E402
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

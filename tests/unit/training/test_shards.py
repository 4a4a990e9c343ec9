"""This rank's part of a gradient under each stage of ZeRO, and a step without the optimizer, on plain objects.

DeepSpeed's own attributes are set by hand.
"""

from types import SimpleNamespace

import pytest
import torch

from bapo_openrlhf.training.worker import shards

WORLD, NUMBERS = 3, torch.arange(1.0, 11.0)  # of a weight of 2 x 5; none of them is 0


def without_zero(rank):
    weight = torch.nn.Parameter(torch.zeros(2, 5))
    weight.grad = NUMBERS.view(2, 5)
    return weight


def stage_2(rank):
    """Rank 0 has other weights, rank 1 the first four numbers, and rank 2 the others."""
    weight = torch.nn.Parameter(torch.zeros(2, 5))
    part = [None, NUMBERS[:4], NUMBERS[4:]][rank]
    weight._index_in_param_group = 1
    weight._hp_mapping = part if part is None else SimpleNamespace(get_lp_grad_fragment=[None, part].__getitem__)
    return weight


def stage_1_in_float32(rank):
    """The weights are divided, and their gradient is not. That of the last micro-batch is still there."""
    weight = stage_2(rank)
    weight.grad, weight._hp_grad = torch.ones(2, 5), NUMBERS.view(2, 5)
    return weight


def stage_3(rank):
    """Each rank has four numbers. The last ones are filled up with what happens to be in memory."""
    weight = torch.nn.Parameter(torch.zeros(0))
    filled = torch.cat([NUMBERS, torch.full((2,), torch.nan)])[4 * rank : 4 * rank + 4]
    weight.ds_tensor, weight.ds_numel, weight.ds_process_group = torch.zeros(4), 10, "all"
    weight._z3_optimizer = SimpleNamespace(get_local_fp32_grad_for_param=lambda _: filled)
    weight.ds_id = 0
    return weight


@pytest.mark.parametrize("kind", [without_zero, stage_1_in_float32, stage_2, stage_3])
def test_the_parts_of_all_ranks_are_the_gradient_once(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    energies, parts = [], []
    for rank in range(WORLD):
        dist = SimpleNamespace(get_rank=lambda *_, r=rank: r, get_world_size=lambda: WORLD, all_reduce=energies.append)
        monkeypatch.setattr(shards, "dist", dist)
        weight = kind(rank)
        parts.append(shards.gradient_part(weight))
        head = SimpleNamespace(get_output_embeddings=lambda w=weight: SimpleNamespace(weight=w))
        shards.head_energy(head)  # the sum over ranks is that of what each of them adds
    assert torch.cat(parts).tolist() == NUMBERS.tolist()
    assert float(sum(energies)) == float(NUMBERS.square().sum())


def test_a_step_without_the_optimizer_leaves_adam_and_the_schedule_where_they_are():
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (step + 1))
    engine = SimpleNamespace(basic_optimizer=adam, lr_scheduler=schedule)

    def step():
        """As DeepSpeed's engine."""
        weight.grad = torch.ones(2)
        engine.basic_optimizer.step()
        if engine.lr_scheduler:
            engine.lr_scheduler.step()

    step()
    before = weight.tolist(), adam.state[weight]["exp_avg"].tolist(), float(adam.state[weight]["step"])
    with shards.optimizer_left_out(engine):
        step()
    after = weight.tolist(), adam.state[weight]["exp_avg"].tolist(), float(adam.state[weight]["step"])
    assert after == before and schedule.last_epoch == 1 and engine.lr_scheduler is schedule
    step()
    assert weight.tolist() != before[0] and schedule.last_epoch == 2

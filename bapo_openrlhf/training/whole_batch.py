"""Divide one rank's share of a batch into micro-batches, and decide after which of them the optimizer steps.

OpenRLHF trains only on whole micro-batches, and with dynamic batching only on whole optimizer steps; it drops the rest.
Here every sample is trained on. The last micro-batch of a rank may be smaller, and so may the last optimizer step. A
filler is a fully masked sample. It takes the place of a micro-batch that a rank would have less than another, so all
ranks have equally many micro-batches.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from openrlhf.trainer.ppo_utils.experience import Experience
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from bapo_openrlhf.adapt.arithmetic import MicroBatch, micro_batch_plan, step_totals
from bapo_openrlhf.training.contract import extends

# OpenRLHF's plan of dynamic batching has these lists in addition to the sample indices; one entry per micro-batch.
PLANNED = ("dynamic_batch_num_tokens", "dynamic_global_batch_size", "dynamic_optimizer_step")


class WholeBatchReplayBuffer(NaiveReplayBuffer):
    """OpenRLHF's buffer of one rank. Every sample in it is trained on.

    Attributes:
        plan: This rank's micro-batches of an epoch, in order.
        total: Number of samples of the batch on all ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan: list[MicroBatch] = []
        self.total = 0

    def take(self, share: Experience | None, filler: Experience, total: int) -> None:
        """Take this rank's share of a batch. It replaces a share that was not trained on (`--critic.freezing_steps`).

        Args:
            share: The samples; None if the rank has none.
            filler: A fully masked sample, in case one is needed.
            total: Number of samples of the batch on all ranks.
        """
        self.clear()
        self.append(filler)
        self.filler = self.items.pop()
        if share is not None:
            self.append(share)
        self.total = total

    def set_up(self, strategy: Any) -> None:
        """Plan the micro-batches of the samples that are in the buffer now, without dynamic batching."""
        ranks, args = data_parallel_ranks(strategy), strategy.args.train
        self.plan = micro_batch_plan(self.total, len(self.items), ranks, self.sample_batch_size, args.batch_size)
        if self.plan[-1].samples == 0:
            self.items.append(self.filler)

    @extends(NaiveReplayBuffer)
    def setup_dynamic_batch(self, strategy: Any) -> None:
        """Plan micro-batches by tokens, one optimizer step at a time. OpenRLHF calls this before it trains.

        For each step, OpenRLHF plans a training batch that has only the samples of this step. If the rank has one
        sample less than another rank, a filler takes part in the plan. It is taken out again if it shares a
        micro-batch with a sample.
        """
        ranks = data_parallel_ranks(strategy)
        window, share = strategy.args.train.batch_size // ranks, -(-self.total // ranks)
        samples = long_and_short(self.items) + [self.filler] * (share - len(self.items))
        last, indices, plan = len(self.items), [], []
        planned: dict[str, list] = {name: [] for name in PLANNED}
        for step, total in enumerate(step_totals(self.total, strategy.args.train.batch_size)):
            start = step * window
            self.items = samples[start : start + window]
            super().setup_dynamic_batch(_one_step(strategy, len(self.items) * ranks))
            parts = [[start + index for index in part] for part in self.dynamic_indices]
            parts = [[index for index in part if index < last] or part for part in parts]
            sizes = [len(part) if part[0] < last else 0 for part in parts]
            filled = torch.tensor(sum(size > 0 for size in sizes), device=torch.cuda.current_device())
            dist.all_reduce(filled, op=dist.ReduceOp.SUM, group=strategy.ds_device_mesh["dp"].get_group())
            plan += [
                MicroBatch(size, bool(closes), total, int(filled))
                for size, closes in zip(sizes, self.dynamic_optimizer_step, strict=True)
            ]
            indices += parts
            for name, values in planned.items():
                values += getattr(self, name)
        self.items, self.plan, self.dynamic_indices = samples, plan, indices
        self.dynamic_sample_loss_scale = [1.0] * len(plan)  # workers.py scales the auxiliary loss itself
        for name, values in planned.items():
            setattr(self, name, values)


def long_and_short(items: list[Experience]) -> list[Experience]:
    """Reorder samples that are sorted by length, so that each optimizer step gets long and short ones."""
    return [items[place // 2 if place % 2 == 0 else -(place + 1) // 2] for place in range(len(items))]


def data_parallel_ranks(strategy: Any) -> int:
    """The number of ranks that share the samples of a batch. A ring or tensor-parallel group counts as one rank."""
    return dist.get_world_size(group=strategy.ds_device_mesh["dp"].get_group())


def _one_step(strategy: Any, samples: int) -> Any:
    """A copy of `strategy` for a run whose training batch is one optimizer step of `samples` samples."""
    step = copy.copy(strategy)
    step.args = copy.copy(strategy.args)
    step.args.train, step.args.rollout = copy.copy(step.args.train), copy.copy(step.args.rollout)
    step.args.train.batch_size = step.args.rollout.batch_size = samples
    return step


class MicroBatches(Sampler[list[int]]):
    """Yields the buffer positions of each micro-batch. If there is a filler, it comes last."""

    def __init__(self, buffer: WholeBatchReplayBuffer, size: int, shuffle: bool) -> None:
        self.plan = buffer.plan
        places = range(sum(part.samples for part in self.plan))
        order = RandomSampler(places) if shuffle and places else SequentialSampler(places)
        self.samples, self.filler = BatchSampler(order, size, drop_last=False), len(places)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.samples
        if self.plan[-1].samples == 0:
            yield [self.filler]


class WholeBatchLoader(DataLoader):
    """Replaces OpenRLHF's DataLoader, which drops the samples that do not fill a micro-batch."""

    def __init__(
        self, buffer: WholeBatchReplayBuffer, *, batch_size: int, shuffle: bool, drop_last: bool, **settings: Any
    ) -> None:
        if buffer.dynamic_batch:  # each item is a planned micro-batch
            super().__init__(buffer, batch_size=batch_size, shuffle=shuffle, **settings)
        else:
            super().__init__(buffer, batch_sampler=MicroBatches(buffer, batch_size, shuffle), **settings)

"""The samples of one rank's share of a batch, and the micro-batches and optimizer steps in which it trains on them.

OpenRLHF trains only on whole micro-batches, and with dynamic batching only on whole optimizer steps; it drops the rest.
Here every sample is trained on. The last micro-batch of a rank may be smaller, and so may the last optimizer step. A
filler is a fully masked sample. It takes the place of a micro-batch that a rank would have less than another, so all
ranks have equally many micro-batches.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from bapo_openrlhf.adapt.arithmetic import MicroBatch, micro_batch_plan, parts_by_tokens, step_totals, token_plan
from bapo_openrlhf.flags.sizes import most_tokens


class WholeBatchReplayBuffer:
    """The samples of one rank, in the place of OpenRLHF's buffer. Every sample in it is trained on.

    Args:
        sample_batch_size: Samples of a micro-batch, if micro-batches have a number of samples.
        packing_samples: Whether samples are packed and not padded.

    Attributes:
        plan: This rank's micro-batches of an epoch, in order.
        total: Number of samples of the batch on all ranks.
        items: This rank's samples, without the filler.
        filler: A fully masked sample.
    """

    def __init__(self, sample_batch_size: int, packing_samples: bool = False) -> None:
        self.sample_batch_size, self.packing_samples = sample_batch_size, packing_samples
        self.plan: list[MicroBatch] = []
        self.total = 0
        self.items: list[Experience] = []

    def clear(self) -> None:
        """Forget the samples."""
        self.items = []

    def take(self, share: Experience | None, filler: Experience, total: int) -> None:
        """Take this rank's share of a batch. It replaces a share that was not trained on (`--critic.freezing_steps`).

        Args:
            share: The samples; None if the rank has none.
            filler: A fully masked sample, in case one is needed.
            total: Number of samples of the batch on all ranks.
        """
        (self.filler,) = without_padding(filler)
        self.items = [] if share is None else without_padding(share)
        self.total = total

    def set_up(self, strategy: Any) -> None:
        """Plan the micro-batches of the samples that are in the buffer now, by their number or by their tokens."""
        args, ranks = strategy.args, data_parallel_ranks(strategy)
        limit = most_tokens(args, "train")
        if limit is None:
            size, window = self.sample_batch_size, args.train.batch_size
            self.plan = micro_batch_plan(self.total, len(self.items), ranks, size, window)
            return
        window, samples = args.train.batch_size // ranks, long_and_short(self.items)
        steps = [samples[start : start + window] for start in range(0, -(-self.total // ranks), window)]
        lengths = [[int(sample.total_length) for sample in step] for step in steps]
        parts = [parts_by_tokens(step, limit, padded=not self.packing_samples) for step in lengths]
        counts = torch.tensor([len(step_parts) for step_parts in parts], device=torch.cuda.current_device())
        most, filled, group = counts.clone(), counts, strategy.ds_device_mesh["dp"].get_group()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(filled, op=dist.ReduceOp.SUM, group=group)
        totals = step_totals(self.total, args.train.batch_size)
        sizes = [list(map(len, step_parts)) for step_parts in parts]
        self.plan = token_plan(totals, sizes, most.tolist(), filled.tolist())
        self.items = [
            step[place] for step, step_parts in zip(steps, parts, strict=True) for part in step_parts for place in part
        ]

    def loader(self, shuffle: bool, pin_memory: bool) -> DataLoader:
        """The micro-batches of an epoch, in the order of the plan, in the memory of the CPU.

        Args:
            shuffle: Whether the samples change their places. Those of a plan by tokens never do.
            pin_memory: Whether a GPU is to copy them from pinned memory.
        """
        return DataLoader(
            [*self.items, self.filler],  # type: ignore[arg-type]
            batch_sampler=MicroBatches(self.plan, shuffle),
            collate_fn=partial(make_experience_batch, packing_samples=self.packing_samples),
            pin_memory=pin_memory,
        )


class MicroBatches(Sampler[list[int]]):
    """Yields the buffer positions of each micro-batch of a plan. The filler has the last position.

    Args:
        plan: The micro-batches.
        shuffle: Whether the samples are drawn in random order.
    """

    def __init__(self, plan: list[MicroBatch], shuffle: bool) -> None:
        self.plan = plan
        places = range(sum(part.samples for part in plan))
        self.order = RandomSampler(places) if shuffle and places else SequentialSampler(places)
        self.filler = len(places)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        places = iter(self.order)
        for part in self.plan:
            yield list(islice(places, part.samples)) or [self.filler]


def without_padding(experience: Experience) -> list[Experience]:
    """The samples of a batch, without padding."""
    return remove_padding_in_sequences(split_experience_batch(experience))


def long_and_short(items: list[Experience]) -> list[Experience]:
    """Reorder samples that are sorted by length, so that each optimizer step gets long and short ones."""
    return [items[place // 2 if place % 2 == 0 else -(place + 1) // 2] for place in range(len(items))]


def data_parallel_ranks(strategy: Any) -> int:
    """The number of ranks that share the samples of a batch. A ring or tensor-parallel group counts as one rank."""
    return dist.get_world_size(group=strategy.ds_device_mesh["dp"].get_group())

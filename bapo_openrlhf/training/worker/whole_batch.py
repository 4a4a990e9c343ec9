"""The samples of one rank's share of a batch, and the micro-batches and optimizer steps in which it trains on them.

OpenRLHF drops what fills no micro-batch, or with dynamic batching no optimizer step. Here every sample is trained on,
so the last of these may be smaller. A filler, a fully masked sample, takes the place of a micro-batch that a rank would
have less than another. A skipped sample (`--adapt.skip_zero_advantage`) is planned as every other one, and then left
out. Its optimizer step still divides by it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from bapo_openrlhf.adapt.arithmetic import MicroBatch, micro_batch_parts, micro_batch_plan, step_totals
from bapo_openrlhf.adapt.batch import Skipped
from bapo_openrlhf.flags.sizes import most_tokens


class Contents(NamedTuple):
    """A micro-batch of samples that pass the model, or of the filler; their number; and the tokens of skipped ones."""

    experience: Experience
    count: int
    skipped: list[int]


class Step(NamedTuple):
    """This rank's micro-batches of an optimizer step, and the generated tokens of each of its skipped samples."""

    parts: list[tuple[MicroBatch, Experience]]
    skipped: list[int]


class WholeBatchReplayBuffer:
    """The samples of one rank, in the place of OpenRLHF's buffer. Every sample in it is trained on.

    Attributes:
        plan: This rank's micro-batches of an epoch, in order.
        total: Number of samples of the batch on all ranks, also of those that are skipped.
        items: This rank's samples, without the filler.
    """

    skips = False  # whether there may be skipped samples on some rank

    def __init__(self, sample_batch_size: int, packing_samples: bool = False) -> None:
        self.sample_batch_size, self.packing_samples = sample_batch_size, packing_samples
        self.plan: list[MicroBatch] = []
        self.total = 0
        self.items: list[Experience | Skipped] = []

    @property
    def passed(self) -> list[Experience]:
        """This rank's samples without those that are skipped."""
        return [item for item in self.items if not isinstance(item, Skipped)]

    def clear(self) -> None:
        """Forget the samples."""
        self.items = []

    def take(self, share: Experience | None, filler: Experience, total: int, skipped: Sequence[Skipped] = ()) -> None:
        """Take this rank's share of a batch in the place of one that was not trained on (`--critic.freezing_steps`)."""
        (self.filler,) = without_padding(filler)
        self.items = [] if share is None else [*without_padding(share)]
        for sample in skipped:
            self.items.insert(sample.place, sample)
        self.total = total

    def set_up(self, strategy: Any) -> None:
        """Plan the micro-batches of the samples that are in the buffer now, by their number or by their tokens.

        An optimizer step but the last has `--train.batch_size` samples, a multiple of the ranks x the micro-batch.
        """
        args, ranks = strategy.args, data_parallel_ranks(strategy)
        self.skips = args.adapt.skip_zero_advantage
        limit, size, padded = most_tokens(args, "train"), self.sample_batch_size, not self.packing_samples
        window, samples = args.train.batch_size // ranks, self.items if limit is None else long_and_short(self.items)
        steps = [samples[start : start + window] for start in range(0, -(-self.total // ranks), window)]
        lengths = [[int(sample.total_length) for sample in step] for step in steps]
        parts = [micro_batch_parts(step_lengths, size, limit, padded=padded) for step_lengths in lengths]
        counts = torch.tensor([len(step_parts) for step_parts in parts], device=torch.cuda.current_device())
        maxima, sums, group = counts.clone(), counts, strategy.ds_device_mesh["dp"].get_group()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        totals = step_totals(self.total, args.train.batch_size)
        sizes = [list(map(len, step_parts)) for step_parts in parts]
        self.plan = micro_batch_plan(totals, sizes, maxima.tolist(), sums.tolist())
        self.items = [
            step[place] for step, step_parts in zip(steps, parts, strict=True) for part in step_parts for place in part
        ]

    def loader(self, shuffle: bool, pin_memory: bool) -> DataLoader:
        """The micro-batches of an epoch, in the order of the plan, in the memory of the CPU."""
        return DataLoader(
            [*self.items, self.filler],  # type: ignore[arg-type]
            batch_sampler=micro_batches(self.plan, shuffle),
            collate_fn=self.draw,
            pin_memory=pin_memory,
        )

    def draw(self, items: Sequence[Experience | Skipped]) -> Contents:
        """A micro-batch of the plan, from its samples, or from the filler."""
        passed = [item for item in items if not isinstance(item, Skipped)]
        skipped = [item.tokens for item in items if isinstance(item, Skipped)]
        count = sum(item is not self.filler for item in passed)
        return Contents(make_experience_batch(passed or [self.filler], self.packing_samples), count, skipped)

    def steps(self, contents: Iterable[Contents], strategy: Any) -> Iterator[Step]:
        """The optimizer steps of an epoch, from the micro-batches of the plan."""
        parts: list[tuple[MicroBatch, Contents]] = []
        for pair in zip(self.plan, contents, strict=True):
            parts.append(pair)
            if pair[0].closes:
                passed = [(replace(part, samples=each.count), each.experience) for part, each in parts]
                skipped = [tokens for _, each in parts for tokens in each.skipped]
                yield Step(self._in_step(passed, strategy) if self.skips else passed, skipped)
                parts = []

    def _in_step(
        self, parts: list[tuple[MicroBatch, Experience]], strategy: Any
    ) -> list[tuple[MicroBatch, Experience]]:
        """The micro-batches that have samples, and fillers so that all ranks have equally many, and at least one."""
        passed = [pair for pair in parts if pair[0].samples]
        most = torch.tensor(max(len(passed), 1), device=torch.cuda.current_device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=strategy.ds_device_mesh["dp"].get_group())
        filler = make_experience_batch([self.filler], self.packing_samples)
        passed += [(replace(parts[-1][0], samples=0), filler)] * (int(most) - len(passed))
        return [(replace(part, closes=n == len(passed)), each) for n, (part, each) in enumerate(passed, start=1)]


def micro_batches(plan: Sequence[MicroBatch], shuffle: bool) -> Iterator[list[int]]:
    """The buffer positions of each micro-batch of a plan. The filler has the last position."""
    samples = range(sum(part.samples for part in plan))
    places = iter(RandomSampler(samples) if shuffle and samples else SequentialSampler(samples))
    for part in plan:
        yield list(islice(places, part.samples)) or [len(samples)]


def without_padding(experience: Experience) -> list[Experience]:
    """The samples of a batch, without padding."""
    return remove_padding_in_sequences(split_experience_batch(experience))


def long_and_short(items: list[Experience]) -> list[Experience]:
    """Reorder samples that are sorted by length, so that each optimizer step gets long and short ones."""
    return [items[place // 2 if place % 2 == 0 else -(place + 1) // 2] for place in range(len(items))]


def data_parallel_ranks(strategy: Any) -> int:
    """The number of ranks that share the samples of a batch. A ring or tensor-parallel group counts as one rank."""
    return dist.get_world_size(group=strategy.ds_device_mesh["dp"].get_group())

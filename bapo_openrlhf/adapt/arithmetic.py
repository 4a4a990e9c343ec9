"""Batch arithmetic: how the samples of a batch become micro-batches and optimizer steps on data-parallel ranks.

Each model's samples are dealt to its ranks in shares that differ by at most one. All ranks must make the same number of
forward passes and train on the same number of micro-batches, because they meet in collective calls. If a rank would
have one less, it gets a *filler*: a fully masked sample, which changes no gradient and is counted in no metric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchArithmetic:
    """Counts that follow from a configuration.

    Attributes:
        group_size, capacity: G and B. A training batch holds at most B x G samples: B groups of G.
        rollout_groups: Prompts of a rollout batch.
        train_batch: Samples of an optimizer step.
        ranks: Number of data-parallel ranks of the models, by the names actor, critic and ref.
        micro_train: Samples of a micro-batch in training, on one rank.
        most_skipped: Samples that optimizer steps count in addition to a full batch, at most, and that no model passes.
    """

    group_size: int
    capacity: int
    rollout_groups: int
    train_batch: int
    ranks: dict[str, int]
    micro_train: int
    most_skipped: int = 0

    @property
    def most_samples(self) -> int:
        """Samples that a training batch holds at most."""
        return self.capacity * self.group_size

    def micro_batches(self, model: str = "actor") -> int:
        """Micro-batches that each rank trains on, for a full batch. The last one may be smaller."""
        return math.ceil(math.ceil(self.most_samples / self.ranks[model]) / self.micro_train)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps for a full batch and one epoch. The last one may be smaller."""
        return math.ceil((self.most_samples + self.most_skipped) / self.train_batch)

    def full_samples(self, samples: int) -> int:
        """Samples that the optimizer steps for a batch of `samples` would hold if they were full."""
        return min(math.ceil(samples / self.train_batch) * self.train_batch, self.most_samples)


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions of each rank's samples, by length: ranks get about equal tokens, and neighbours need little padding."""
    by_length = sorted(range(len(lengths)), key=lambda position: lengths[position])
    return [by_length[rank::ranks] for rank in range(ranks)]


def in_parts(share: Sequence[int], size: int) -> list[list[int]]:
    """A rank's share in parts of `size` samples. The last part has what is left."""
    return [list(share[start : start + size]) for start in range(0, len(share), size)]


def in_step(parts: Sequence[list[list[int]]]) -> list[list[list[int]]]:
    """The parts of each rank, with empty parts added so that all ranks have equally many. Each stands for a filler."""
    most = max(map(len, parts))
    return [share + [[]] * (most - len(share)) for share in parts]


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank, and the optimizer step that it belongs to.

    Without `samples` it is a filler. The optimizer steps after it if it `closes`. `step_samples` and `step_parts` are
    the samples and the micro-batches, without fillers, of the optimizer step on all ranks.
    """

    samples: int
    closes: bool
    step_samples: int
    step_parts: int


def step_totals(total: int, train_batch: int) -> list[int]:
    """Samples of each optimizer step, on all ranks, for a batch of `total`: `train_batch` in all steps but the last."""
    return [min(total - start, train_batch) for start in range(0, total, train_batch)]


def parts_by_tokens(lengths: Sequence[int], most: int, *, padded: bool) -> list[list[int]]:
    """Positions of the samples of each micro-batch, so that none has more than `most` tokens (first-fit decreasing).

    A longer sample is by itself. With `padded`, each counts as long as the longest of its micro-batch.
    """
    parts: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        for part in parts:
            tokens = lengths[part[0]] * len(part) if padded else sum(lengths[other] for other in part)
            if tokens + lengths[part[0] if padded else place] <= most:
                part.append(place)
                break
        else:
            parts.append([place])
    return parts


def micro_batch_parts(lengths: Sequence[int], size: int, most: int | None, *, padded: bool) -> list[list[int]]:
    """Positions of the samples of each micro-batch: `size` samples, or by tokens if `most` is given."""
    if most is None:
        return in_parts(range(len(lengths)), size)
    return parts_by_tokens(lengths, most, padded=padded)


def micro_batch_plan(
    totals: Sequence[int], rank_sizes: Sequence[Sequence[int]], counts: Sequence[int], real: Sequence[int]
) -> list[MicroBatch]:
    """The micro-batches of one rank for one epoch, in order.

    For each optimizer step, `totals` has the samples on all ranks, `rank_sizes` the samples of each micro-batch of this
    rank, `counts` the micro-batches of the rank that has most, and `real` those on all ranks, without fillers.
    """
    return [
        MicroBatch(samples, part == count, total, parts)
        for total, sizes, count, parts in zip(totals, rank_sizes, counts, real, strict=True)
        for part, samples in enumerate([*sizes, *[0] * (count - len(sizes))], start=1)
    ]

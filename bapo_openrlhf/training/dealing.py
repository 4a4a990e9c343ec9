"""How the samples of a batch are dealt to a model's data-parallel ranks, with fillers for ranks that would have none.

The samples are dealt to the ranks of each model in shares that differ by at most one sample. Fillers exist only between
this module and the workers. Rewards, advantages, whitening and the record never contain one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

from bapo_openrlhf.adapt.arithmetic import deal, in_parts, in_step
from bapo_openrlhf.training.contract import extends

Places = list[int]  # positions of samples in a batch
Cut = Callable[[list[int], list[Places]], list[list[Places]]]  # see `dealt_batches`


def ranks_of(group: RayActorGroup) -> int:
    """Number of data-parallel ranks of a model. All processes of a ring or of a tensor-parallel group are one rank."""
    return len(group._actor_handlers) // group.duplicate_actors


def lengths_of(samples: Sequence[Experience]) -> list[int]:
    """Number of tokens of each sample, without padding."""
    return [int(sample.attention_mask.sum()) for sample in samples]


def filler_of(sample: Experience) -> Experience:
    """A filler: a sample like this one, but without a generated token.

    A filler has the same fields and info keys, tokens to pass through a model, and 0 for every real number. Its loss
    and its gradient are therefore 0. Because of it, its rank takes part in the same collective calls as the others.

    Args:
        sample: One sample, with or without a batch dimension. It is not changed.
    """
    numbers = {
        field.name: torch.zeros_like(value)
        for field in fields(sample)
        if isinstance(value := getattr(sample, field.name), torch.Tensor) and value.is_floating_point()
    }
    info = {key: torch.zeros_like(value) for key, value in sample.info.items()}
    return replace(sample, **numbers, action_mask=torch.zeros_like(sample.action_mask), info=info, index=[])


def order_info(samples: Sequence[Experience]) -> None:
    """Put the keys of all samples' `info` into one order, because the ranks reduce metrics one after the other.

    Raises:
        ValueError: Samples have different keys. The ranks would reduce one metric together with another.
    """
    keys = list(samples[0].info)
    for sample in samples:
        if sample.info.keys() != set(keys):
            raise ValueError(
                f"a sample's info has the keys {', '.join(sorted(sample.info))}, another's "
                f"{', '.join(sorted(keys))}; a reward function must give the same extra_logs for every response"
            )
        sample.info = {key: sample.info[key] for key in keys}


def dealt_batches(samples: Sequence[Experience], ranks: int, cut: Cut, pad: int) -> list[list[Experience]]:
    """Batches of the samples for each rank. All ranks have equally many batches, and some end with a filler.

    Args:
        samples: One sample each, with a batch dimension of 1.
        ranks: Number of data-parallel ranks.
        cut: Makes the parts of each rank's share. It is called with the lengths of all samples and with the shares.
        pad: Token id of the padding.
    """
    lengths = lengths_of(samples)
    dealt = deal(lengths, ranks)
    filler = filler_of(samples[dealt[0][0]])  # the first rank's first sample is the shortest: its filler costs least

    def batch(part: Places) -> Experience:
        return Experience.concat_experiences([samples[place] for place in part], pad) if part else filler

    return [[batch(part) for part in own] for own in in_step(cut(lengths, dealt))]


class DealtActorGroup(RayActorGroup):
    """OpenRLHF's processes of one model. Its ranks train on shares that differ by at most one sample."""

    @extends(RayActorGroup)
    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks. A batch to train on is first dealt to the ranks."""
        if method_name == "append":
            kwargs = shares(kwargs["experience"], ranks_of(self))
        return super().async_run_method_batch(method_name, **kwargs)


def shares(experiences: Sequence[Experience], ranks: int) -> dict[str, list[Any]]:
    """The arguments of each rank's `append`, by name: its share, a filler, and the number of samples of the batch.

    Args:
        experiences: The batch. Each of them has in `index` the positions of its samples, or all have None.
        ranks: Number of data-parallel ranks.

    Raises:
        ValueError: See `order_info`.
    """
    places = [place for experience in experiences for place in experience.index or []]
    # OpenRLHF's function removes the index of what it gets. So it gets copies, because the critic's shares are made
    # of the same batch.
    samples = [sample for experience in experiences for sample in split_experience_batch(replace(experience))]
    order_info(samples)
    if places:
        samples = [sample for _, sample in sorted(zip(places, samples, strict=True), key=lambda pair: pair[0])]
    dealt = [[samples[place] for place in share] for share in deal(lengths_of(samples), ranks)]
    filler = make_experience_batch([filler_of(dealt[0][0])])  # of the shortest sample, as in `dealt_batches`
    return {
        "experience": [make_experience_batch(share) if share else None for share in dealt],
        "filler": [filler] * ranks,
        "samples": [len(samples)] * ranks,
    }


class DealtBatch:
    """The samples of one batch, as the forward-pass batches that the ranks of each model pass.

    A model may have another number of ranks than the actor, or it may be asked for only some of the samples. It then
    gets batches of its own, and `in_batches` brings its answers back to the batches of this process.

    Args:
        samples: One sample each, without padding. The constructor sets their `index`.
        actor: The actor's processes.
        cut: See `dealt_batches`.
        pad: Token id of the padding.

    Attributes:
        samples: The samples.
        batches: The batches of this process: those of the actor's ranks, one rank after the other, without fillers.

    Raises:
        ValueError: See `order_info`.
    """

    def __init__(self, samples: Sequence[Experience], actor: RayActorGroup, cut: Cut, pad: int) -> None:
        order_info(samples)
        for place, sample in enumerate(samples):
            sample.index = [place]
        self.samples, self._cut, self._pad = samples, cut, pad
        self._passes: dict[int, list[Experience]] = {}  # passes of all samples, by number of ranks
        self.batches = [batch for batch in self.passes(self.places, actor) if batch.index]

    @property
    def places(self) -> Places:
        """Positions of all samples."""
        return list(range(len(self.samples)))

    def passes(self, places: Places, group: RayActorGroup) -> list[Experience]:
        """Forward-pass batches of these samples for all ranks of a model, one rank after the other, with fillers."""
        ranks = ranks_of(group)
        if ranks in self._passes and len(places) == len(self.samples):
            return self._passes[ranks]
        samples = [self.samples[place] for place in places]
        passes = [batch for own in dealt_batches(samples, ranks, self._cut, self._pad) for batch in own]
        if len(places) == len(self.samples):
            self._passes[ranks] = passes
        return passes

    def in_batches(self, rows: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """A model's answers for each batch of this process, shape (B, A).

        Args:
            rows: The answer for each sample, shape (A',), by the sample's position.
        """
        return [stacked([rows[place] for place in batch.index], batch) for batch in self.batches]


def forward_parts(args: SimpleNamespace, lengths: list[int], dealt: list[Places]) -> list[list[Places]]:
    """The parts of each rank's share that pass a model together: a number of samples, or a number of tokens.

    Args:
        args: Arguments of the run.
        lengths: Tokens of each sample.
        dealt: Share of each rank.
    """
    rollout, ds = args.rollout, args.ds
    if not args.train.dynamic_batch_enable:
        return [in_parts(share, rollout.micro_batch_size) for share in dealt]
    own = [[lengths[place] for place in share] for share in dealt]
    tokens = (rollout.max_tokens_per_gpu, ds.ring_attn_size, ds.tensor_parallel_size)
    count = max(get_minimum_num_micro_batch_size(each, *tokens) for each in own)
    parts = [get_seqlen_balanced_partitions(each, min(count, len(each)), False) if each else [] for each in own]
    return [[[share[n] for n in part] for part in cut] for share, cut in zip(dealt, parts, strict=True)]


def rows_of(batches: Sequence[Places], answers: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """A model's answer for each sample, by the sample's position. The answers for fillers are left out.

    Args:
        batches: Positions of the samples of each batch that the model passed.
        answers: The model's answer for each batch.
    """
    return {
        place: row
        for places, answer in zip(batches, answers, strict=True)
        for place, row in zip(places, answer, strict=False)  # the answer for a filler has a row and no place
    }


def stacked(rows: Sequence[torch.Tensor], batch: Experience) -> torch.Tensor:
    """The rows padded to the length of a batch, shape (B, A). There is 0 behind the end of each sample.

    Args:
        rows: Numbers of each sample, shape (A',). Each row has padding of its own.
        batch: The batch of these samples.
    """
    result = rows[0].new_zeros(batch.action_mask.shape)
    for found, row, length in zip(result, rows, batch.attention_mask.sum(-1).tolist(), strict=True):
        found[: length - 1] = row[: length - 1]
    return result

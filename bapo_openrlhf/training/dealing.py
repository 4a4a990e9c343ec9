"""Samples on their way to a model's data-parallel ranks, and fillers where a rank would have none left.

Each model's samples are dealt to its own ranks in shares that differ by at most one sample. Fillers exist only from
here to the worker: rewards, advantages, whitening and the record never see one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

from bapo_openrlhf.adapt.arithmetic import deal, in_parts, in_step

Places = list[int]  # positions of samples in a batch


def ranks_of(group: RayActorGroup) -> int:
    """Data-parallel ranks of a model: the processes of a ring or of a tensor-parallel group count once."""
    return len(group._actor_handlers) // group.duplicate_actors


def lengths_of(samples: Sequence[Experience]) -> list[int]:
    """Tokens of each sample, without padding."""
    return [int(sample.attention_mask.sum()) for sample in samples]


def filler_of(sample: Experience) -> Experience:
    """A sample like this one for a rank that would have none, without an action token.

    It has the same fields and info keys, tokens to pass through a model, and 0 for every real number. So its loss and
    its gradient are 0, and every rank takes part in the same collective calls.

    Args:
        sample: one sample, with or without a batch dimension; it stays as it is.
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
        ValueError: samples have different keys. The ranks would reduce one metric together with another.
    """
    keys = list(samples[0].info)
    for sample in samples:
        if sample.info.keys() != set(keys):
            raise ValueError(
                f"a sample's info has the keys {', '.join(sorted(sample.info))}, another's "
                f"{', '.join(sorted(keys))}; a reward function must give the same extra_logs for every response"
            )
        sample.info = {key: sample.info[key] for key in keys}


def dealt_batches(
    samples: Sequence[Experience], ranks: int, cut: Callable[[list[int], list[Places]], list[list[Places]]], pad: int
) -> list[list[Experience]]:
    """The samples as batches for each rank; all ranks have equally many, and some end with a filler.

    Args:
        samples: one sample each, with a batch dimension of 1.
        cut: makes the parts of each rank's share, from the lengths of all samples and the shares.
        pad: token id of the padding.
    """
    lengths = lengths_of(samples)
    dealt = deal(lengths, ranks)
    filler = filler_of(samples[dealt[0][0]])  # the shortest sample is dealt first, and a filler like it costs least

    def batch(part: Places) -> Experience:
        return Experience.concat_experiences([samples[place] for place in part], pad) if part else filler

    return [[batch(part) for part in own] for own in in_step(cut(lengths, dealt))]


class DealtActorGroup(RayActorGroup):
    """OpenRLHF's processes of one model, whose ranks train on shares that differ by at most one sample."""

    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> list[Any]:
        """As OpenRLHF's; a batch to train on is dealt to the ranks first."""
        if method_name == "append":
            kwargs = shares(kwargs["experience"], ranks_of(self))
        return super().async_run_method_batch(method_name, **kwargs)


def shares(experiences: Sequence[Experience], ranks: int) -> dict[str, list[Any]]:
    """What each rank's `append` is given, by name of the argument: its share, a filler, and the size of the batch.

    Args:
        experiences: the batch; each has `index`, the positions of its samples, or all have None.

    Raises:
        ValueError: see `order_info`.
    """
    places = [place for experience in experiences for place in experience.index or []]
    # OpenRLHF's function removes the index from what it is given, and the critic's share is made from the same batch.
    samples = [sample for experience in experiences for sample in split_experience_batch(replace(experience))]
    order_info(samples)
    if places:
        samples = [sample for _, sample in sorted(zip(places, samples, strict=True), key=lambda pair: pair[0])]
    dealt = [[samples[place] for place in share] for share in deal(lengths_of(samples), ranks)]
    filler = make_experience_batch([filler_of(dealt[0][0])])  # the shortest sample is dealt first
    return {
        "experience": [make_experience_batch(share) if share else None for share in dealt],
        "filler": [filler] * ranks,
        "samples": [len(samples)] * ranks,
    }


class DealtExperienceMaker(RemoteExperienceMaker):
    """OpenRLHF's experience maker, where every model's ranks pass shares that differ by at most one sample.

    The batches of this process are those of the actor's ranks, without fillers. A model with another number of ranks,
    or one that is asked for some of the samples only, gets batches of its own; its answers are sorted back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self._samples: Sequence[Experience] = ()  # of the batch, without padding
        self._batches: Sequence[Experience] = ()  # the same, as the actor's ranks pass them
        self._passes: dict[int, list[Experience]] = {}  # the same with fillers, by number of ranks
        self._asked: dict[int, tuple[Any, list[Places]]] = {}  # by id of Ray's references: model, samples by batch

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Forward-pass batches of samples of like lengths, one rank of the actor after the other.

        Raises:
            ValueError: see `order_info`.
        """
        self._forget()
        order_info(rollout_samples)
        for place, sample in enumerate(rollout_samples):
            sample.index = [place]
        self._samples = rollout_samples
        self._batches = [batch for batch in self._passes_of(range(len(rollout_samples)), self.actor_model_group)
                         if batch.index]  # fmt: skip
        return list(self._batches)

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """As OpenRLHF's."""
        experiences = super().make_experience(samples_list)
        self._forget()
        return experiences

    def _passes_of(self, places: Sequence[int], group: RayActorGroup) -> list[Experience]:
        """Forward-pass batches of these samples for all ranks of a model, one rank after the other, with fillers."""
        ranks, pad = ranks_of(group), self.tokenizer.pad_token_id
        if ranks in self._passes and len(places) == len(self._samples):
            return self._passes[ranks]
        samples = [self._samples[place] for place in places]
        passes = [batch for own in dealt_batches(samples, ranks, self._cut, pad) for batch in own]
        if len(places) == len(self._samples):
            self._passes[ranks] = passes
        return passes

    def _cut(self, lengths: list[int], dealt: list[Places]) -> list[list[Places]]:
        """The parts of each rank's share that pass a model together: so many samples, or so many tokens."""
        rollout, ds = self.args.rollout, self.args.ds
        if not self.args.train.dynamic_batch_enable:
            return [in_parts(share, rollout.micro_batch_size) for share in dealt]
        own = [[lengths[place] for place in share] for share in dealt]
        tokens = (rollout.max_tokens_per_gpu, ds.ring_attn_size, ds.tensor_parallel_size)
        count = max(get_minimum_num_micro_batch_size(each, *tokens) for each in own)
        parts = [get_seqlen_balanced_partitions(each, min(count, len(each)), False) if each else [] for each in own]
        return [[[share[n] for n in part] for part in cut] for share, cut in zip(dealt, parts, strict=True)]

    def _wanted(self, group: RayActorGroup) -> Places:
        """Positions of the samples that a model is asked for."""
        return list(range(len(self._samples)))

    def _dispatch_forward(self, group: RayActorGroup, sync_condition: bool, **inputs: Any) -> Any:
        """OpenRLHF's call of a model, for batches that are dealt to the ranks of this model."""
        wanted, refs, batches = self._wanted(group), [], []
        if wanted:
            batches = self._passes_of(wanted, group)
            # OpenRLHF's names of the inputs are those of an experience's fields; one ends in _list.
            inputs = {name: [getattr(batch, name.removesuffix("_list")) for batch in batches] for name in inputs}
            refs = super()._dispatch_forward(group, sync_condition, **inputs)
        self._asked[id(refs)] = group, [batch.index for batch in batches]
        return refs

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list[Any]:
        """OpenRLHF's gathering of a model's answers, sorted back to the batches of this process."""
        answers = super()._flatten_results(refs, duplicate_factor)
        if id(refs) not in self._asked:
            return answers  # there is no such model
        group, asked = self._asked.pop(id(refs))
        rows = {
            place: row
            for places, answer in zip(asked, answers, strict=True)
            for place, row in zip(places, answer, strict=False)  # a filler has a row and no place
        }
        return self._sorted_back(group, rows)

    def _sorted_back(self, group: RayActorGroup, rows: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """A model's answers for each batch of this process, (B, A), from those for each sample, (A',)."""
        return [stacked([rows[place] for place in batch.index], batch) for batch in self._batches]


def stacked(rows: Sequence[torch.Tensor], batch: Experience) -> torch.Tensor:
    """Numbers for each place of a batch's samples, (B, A); 0 behind the end of a sample.

    Args:
        rows: (A',) each, with padding of its own.
    """
    result = rows[0].new_zeros(batch.action_mask.shape)
    for found, row, length in zip(result, rows, batch.attention_mask.sum(-1).tolist(), strict=True):
        found[: length - 1] = row[: length - 1]
    return result

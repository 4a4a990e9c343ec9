"""How the samples of a batch are dealt to a model's data-parallel ranks, with fillers for ranks that would have none.

The shares differ by at most one sample. Fillers exist only between this module and the workers: rewards, advantages,
whitening and the record never contain one. What a rank gets is put into Ray's object store once, for all models with
equally many ranks.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ray.launcher import RayActorGroup

from bapo_openrlhf.adapt.arithmetic import deal, in_step, micro_batch_parts
from bapo_openrlhf.adapt.batch import Batch, Skipped, skipped
from bapo_openrlhf.flags.sizes import most_tokens
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.trainer.samples import samples_of
from bapo_openrlhf.training.wire.packing import Packed, packed, unpacked

INPUTS = ("sequences", "action_mask", "attention_mask")  # of a forward pass
Places = list[int]  # positions of samples in a batch


def ranks_of(workers: RayActorGroup) -> int:
    """Number of data-parallel ranks of a model. All processes of a tensor-parallel group are one rank."""
    return len(workers._actor_handlers) // workers.duplicate_actors


def length_of(sample: Experience | Skipped) -> int:
    """Number of tokens of a sample, without padding."""
    return sample.total_length if isinstance(sample, Skipped) else int(sample.attention_mask.sum())


def filler_of(sample: Experience) -> Experience:
    """A filler: a sample like this one, but without a generated token, and with 0 for every real number.

    Its loss and its gradient are therefore 0, and its rank takes part in the same collective calls as the others.
    """
    numbers = {
        field.name: torch.zeros_like(value)
        for field in fields(sample)
        if isinstance(value := getattr(sample, field.name), torch.Tensor) and value.is_floating_point()
    }
    info = {key: torch.zeros_like(value) for key, value in sample.info.items()}
    return replace(sample, **numbers, action_mask=torch.zeros_like(sample.action_mask), info=info, index=[])


def skipped_samples(batch: Batch, args: SimpleNamespace) -> tuple[list[Skipped], list[Experience]]:
    """The samples of a batch that no model passes, and a filler in case it has no others; nothing without them."""
    if not (args.adapt.skip_zero_advantage and batch.silent):
        return [], []
    filler = filler_of(min(samples_of(batch.silent), key=length_of))
    numbers = ("action_log_probs", "base_action_log_probs", "advantages", "values", "returns")
    zeros = {name: torch.zeros(filler.action_mask.shape) for name in numbers}
    return skipped(batch), [replace(filler, **zeros)]


def order_info(samples: Sequence[Experience]) -> None:
    """Give all samples the same keys of `info` in one order, because ranks reduce them in turn; nan if missing."""
    values: dict[str, torch.Tensor] = {}
    for sample in samples:
        values |= sample.info
    nothing = {key: torch.full_like(value, math.nan, dtype=torch.float) for key, value in values.items()}
    for sample in samples:
        sample.info = nothing | sample.info


def dealt_batches(samples: Sequence[Experience], ranks: int, args: SimpleNamespace, pad: int) -> list[list[Experience]]:
    """Batches of the samples for each rank. All ranks have equally many batches, and some end with a filler."""
    lengths = list(map(length_of, samples))
    dealt = deal(lengths, ranks)
    filler = filler_of(samples[dealt[0][0]])  # the first rank's first sample is the shortest: its filler costs least

    def batch(part: Places) -> Experience:
        if len(part) == 1:  # it has the tensors of its sample
            return samples[part[0]]
        return Experience.concat_experiences([samples[place] for place in part], pad) if part else filler

    return [[batch(part) for part in share] for share in in_step(forward_parts(args, lengths, dealt))]


class DealtActorGroup(RayActorGroup):
    """OpenRLHF's processes of one model. Its ranks train on shares that differ by at most one sample."""

    _sent: ClassVar[dict[tuple, Any]] = {}  # what is in Ray's object store now; all models have the same dict
    skipped: Sequence[Skipped] = ()  # are dealt with the next batch to train on, though no model passes them

    @extends(RayActorGroup)
    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks, once for each item of the lists. Returns Ray's references, one for each process.

        Each rank gets an equal part of the lists, in order; the last ones may get less. The lists are equally long.
        """
        ranks = ranks_of(self)
        size = -(-len(next(iter(kwargs.values()))) // ranks)
        parts = (slice(rank * size, (rank + 1) * size) for rank in range(ranks))
        calls = [self._call({name: values[part] for name, values in kwargs.items()}) for part in parts]
        return self._send(method_name, calls)

    def take(self, samples: Sequence[Experience]) -> list[Any]:
        """Deal a batch to train on to the ranks, in the place of one that they have. Returns Ray's references."""
        ranks, skipped, self.skipped = ranks_of(self), self.skipped, ()
        key = (ranks, *map(id, samples))
        refs = self._once(key, samples[0], lambda: training_shares(samples, ranks, skipped))
        return self._send("take", [(ref, 1) for ref in refs])

    def _send(self, method_name: str, calls: Sequence[tuple[Any, int]]) -> list[Any]:
        """Call a method on each rank with its inputs, of which there are so many."""
        copies = self.duplicate_actors  # the processes of a tensor-parallel group get the same
        return [
            process.execute_batch.remote(method_name, inputs, 0, count)
            for rank, (inputs, count) in enumerate(calls)
            for process in self._actor_handlers[rank * copies : (rank + 1) * copies]
        ]

    def _call(self, part: dict[str, list[Any]]) -> tuple[Any, int]:
        """Ray's reference to a rank's inputs, and their number."""
        first = next(iter(part.values()))
        owner = first[0] if len(first) else None
        key = (*part, *(id(item) for items in part.values() for item in items))
        (ref,) = self._once(key, owner, lambda: [part])
        return ref, len(first)

    def _once(self, key: tuple, owner: Any, make: Callable[[], Iterable[dict]]) -> list[Any]:
        """Ray's references to what `make` makes. They are kept for the other models, as long as the owner exists."""
        if key not in self._sent:
            refs = [ray.put(Packed(packed(part))) for part in make()]
            if not isinstance(owner, (torch.Tensor, Experience)):
                return refs
            self._sent[key] = refs
            weakref.finalize(owner, self._sent.pop, key, None)
        return self._sent[key]


def training_shares(
    samples: Sequence[Experience], ranks: int, skipped: Sequence[Skipped] = ()
) -> Iterator[dict[str, list[Any]]]:
    """The arguments of each rank's `take`, by name: its share, a filler, and the number of samples of the batch.

    No model passes the skipped samples, which have their places in a share. A filler among the samples, which is there
    if all of them are skipped, has no position.
    """
    # OpenRLHF's function removes the index of what it gets, so it gets copies.
    passed = [sample for batch in samples for sample in split_experience_batch(replace(batch))]
    order_info(passed)
    filler = make_experience_batch([filler_of(min(passed, key=length_of))])  # it costs least
    members: list[Experience | Skipped] = [] if samples[0].index == [] else [*passed]
    for sample in skipped:
        members.insert(sample.place, sample)
    for share in deal(list(map(length_of, members)), ranks):
        of_rank = [members[place] for place in share]
        rank_samples = [member for member in of_rank if not isinstance(member, Skipped)]
        rank_batch = make_experience_batch(rank_samples) if rank_samples else None
        for name, values in rank_batch.info.items() if rank_batch else ():
            rank_batch.info[name] = torch.stack(values) if isinstance(values, list) else values
        left_out = [replace(m, place=place) for place, m in enumerate(of_rank) if isinstance(m, Skipped)]
        yield {"experience": [rank_batch], "filler": [filler], "samples": [len(members)], "skipped": [left_out]}


class DealtBatch:
    """The samples of a batch for forward passes. What a model says of a sample comes back by the sample's position."""

    def __init__(self, samples: Sequence[Experience], args: SimpleNamespace, pad: int) -> None:
        self.samples = [replace(sample, index=[place], info={}) for place, sample in enumerate(samples)]
        self._args, self._pad = args, pad
        self._forward_batches: dict[Sequence[int], list[Experience]] = {}  # by number of ranks and samples' positions

    def forward_batches(self, places: Places, workers: RayActorGroup) -> list[Experience]:
        """Forward-pass batches of these samples for all ranks of a model, one rank after the other, with fillers."""
        key = (ranks_of(workers), *places)
        if key not in self._forward_batches:
            samples = [self.samples[place] for place in places]
            dealt = dealt_batches(samples, key[0], self._args, self._pad)
            self._forward_batches[key] = [batch for rank_batches in dealt for batch in rank_batches]
        return self._forward_batches[key]

    def ask(
        self,
        model: RayActorGroup | None,
        places: Places | None = None,
        *,
        inputs: Sequence[str] = INPUTS,
        images: bool = False,
        alone: bool = False,
    ) -> Callable[[], dict[int, torch.Tensor]]:
        """Send samples through a model. Returns a function that waits for its answers, shape (A,) or (), by position.

        Args:
            places: Positions of the samples; None for all.
            alone: Whether the model shares its GPUs: then it is waited for, and empties its cache.
        """
        places = list(range(len(self.samples))) if places is None else places
        if model is None or not places:
            return dict
        batches = self.forward_batches(places, model)
        arguments = {name: [getattr(batch, name) for batch in batches] for name in inputs}
        if images and any(any(batch.mm_train_inputs or ()) for batch in batches):
            arguments["mm_train_inputs_list"] = [batch.mm_train_inputs for batch in batches]
        refs = model.async_run_method_batch("forward", **arguments)
        if alone:
            ray.get(refs)
            ray.get(model.async_run_method("empty_cache"))

        def answers() -> dict[int, torch.Tensor]:
            of_ranks = ray.get(refs)[:: model.duplicate_actors]  # those of a tensor-parallel group have the same
            result = {}
            for batch, rows in zip(batches, unpacked([*itertools.chain(*of_ranks)]), strict=True):
                for place, row in zip(batch.index, rows, strict=False):  # a filler has a row and no place
                    length = self.samples[place].action_mask.shape[-1]
                    result[place] = row[:length].clone() if row.dim() else row  # without padding, in its own memory
            return result

        return answers


def forward_parts(args: SimpleNamespace, lengths: list[int], dealt: list[Places]) -> list[list[Places]]:
    """The parts of each rank's share that pass a model together: a number of samples, or a number of tokens."""
    size, limit, padded = args.rollout.micro_batch_size, most_tokens(args, "rollout"), not args.ds.packing_samples
    parts = [micro_batch_parts([lengths[place] for place in share], size, limit, padded=padded) for share in dealt]
    return [[[share[n] for n in part] for part in cut] for share, cut in zip(dealt, parts, strict=True)]

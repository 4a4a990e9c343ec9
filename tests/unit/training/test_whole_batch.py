"""A batch of any size on any number of ranks: which rank trains on what, and in which optimizer step.

OpenRLHF's ranks are threads here; their collectives meet at a barrier.
"""

import math
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from openrlhf.trainer.ppo_utils.experience import Experience
from ranks import Ranks, arguments
from torch.utils.data import DataLoader

from bapo_openrlhf.adapt.arithmetic import MicroBatch
from bapo_openrlhf.training.worker.whole_batch import MicroBatches, WholeBatchReplayBuffer

UNHURRIED = settings(suppress_health_check=[HealthCheck.too_slow])


def sample(length: int) -> Experience:
    """A sample of `length` tokens."""
    return Experience(
        sequences=torch.arange(length), attention_mask=torch.ones(length), total_length=torch.tensor(length)
    )


def planned(shares: list[list], args, size: int = 4, *, packed: bool = False) -> list[WholeBatchReplayBuffer]:
    """The buffers of all ranks, each with its share of the batch, after planning."""
    buffers, ranks = [WholeBatchReplayBuffer(size, packing_samples=packed) for _ in shares], Ranks(len(shares))
    for buffer, samples in zip(buffers, shares, strict=True):
        buffer.items, buffer.total, buffer.filler = list(samples), sum(map(len, shares)), "filler"
    ranks.run(lambda rank: buffers[rank].set_up(ranks.strategy(args)))
    return buffers


def steps(buffer: WholeBatchReplayBuffer) -> list[list[list]]:
    """The samples of each micro-batch, by optimizer step; a filler's are none."""
    result, step, places = [], [], MicroBatches(buffer.plan, shuffle=False)
    for part, part_places in zip(buffer.plan, places, strict=True):
        assert (part_places == [len(buffer.items)]) == (part.samples == 0)
        step.append([buffer.items[place] for place in part_places if part.samples])
        if part.closes:
            result.append(step)
            step = []
    assert not step  # the last micro-batch ends an optimizer step
    return result


def assert_steps_are_whole(buffers: list[WholeBatchReplayBuffer], shares: list[list], window: int) -> None:
    """Each sample once an epoch; all ranks step together; each step but the last has `window` samples."""
    total, of_ranks = sum(map(len, shares)), list(map(steps, buffers))
    for share, rank_steps in zip(shares, of_ranks, strict=True):
        assert sorted(id(item) for step in rank_steps for part in step for item in part) == sorted(map(id, share))
    for number, of_step in enumerate(zip(*of_ranks, strict=True)):
        assert len({len(parts) for parts in of_step}) == 1
        taken = [sum(map(len, parts)) for parts in of_step]
        left = min(window, total - number * window)
        assert sum(taken) == left and max(taken) - min(taken) <= 1
        real = sum(bool(part) for parts in of_step for part in parts)
        for buffer, parts in zip(buffers, of_step, strict=True):
            place = sum(len(step) for step in steps(buffer)[:number])
            wanted = [MicroBatch(len(part), n + 1 == len(parts), left, real) for n, part in enumerate(parts)]
            assert buffer.plan[place : place + len(parts)] == wanted
    assert len(of_ranks[0]) == math.ceil(total / window)


# --- by tokens --------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """(samples of each rank, arguments): 1 to 4 ranks with shares that differ by at most one, of any lengths."""
    ranks, share = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    total = draw(st.integers(1, 60))
    counts = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    shares = [[sample(draw(st.integers(2, 40))) for _ in range(count)] for count in counts]
    return shares, arguments(share * ranks, draw(st.integers(20, 100)))


class TestPlanByTokens:
    @UNHURRIED
    @given(batches(), st.booleans())
    def test_whole_steps_of_micro_batches_that_are_not_too_large(self, batch, packed):
        shares, args = batch
        buffers = planned(shares, args, packed=packed)
        assert_steps_are_whole(buffers, shares, args.train.batch_size)
        for parts in chain(*map(steps, buffers)):
            for part in filter(None, parts):
                lengths = [int(item.total_length) for item in part]
                tokens = sum(lengths) if packed else max(lengths) * len(lengths)
                assert tokens <= args.train.max_tokens_per_gpu or len(part) == 1

    def test_by_hand(self):
        """Two ranks, 4 samples a step, 5 and 4 samples: steps of 2 and 2 a rank, and of 1 and a filler."""
        a, b, c, d, e = map(sample, (2, 2, 6, 6, 9))
        f, g, h, i = map(sample, (2, 2, 2, 9))
        first, second = planned([[a, b, c, d, e], [f, g, h, i]], arguments(4, 12))
        # A long one beside a short one: a e b d c, and f i g h. 2 x 9 and 2 x 6 tokens: the first are too many.
        assert steps(first) == [[[e], [a]], [[d, b]], [[c]]]
        assert steps(second) == [[[i], [f]], [[g, h]], [[]]]
        assert first.plan[-1] == MicroBatch(1, True, 1, 1) and second.plan[-1] == MicroBatch(0, True, 1, 1)
        # Packed, 9 + 2 tokens fit.
        assert steps(planned([[a, b, c, d, e], [f, g, h, i]], arguments(4, 12), packed=True)[0])[0] == [[e, a]]


# --- by number --------------------------------------------------------------------------------------------------------


class TestPlanByNumber:
    @given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=9), seed=st.integers(0, 9))
    def test_shuffled_samples_come_once_in_parts_of_the_same_sizes(self, sizes, seed):
        torch.manual_seed(seed)
        parts = list(MicroBatches([MicroBatch(size, True, 1, 1) for size in sizes], shuffle=True))
        real = [part for part, size in zip(parts, sizes, strict=True) if size]
        assert list(map(len, real)) == list(filter(None, sizes))
        assert sorted(chain(*real)) == list(range(sum(sizes)))
        assert all(part == [sum(sizes)] for part, size in zip(parts, sizes, strict=True) if not size)

    @pytest.mark.parametrize("count", [4, 12, 24])
    def test_order_and_random_numbers_are_those_of_openrlhfs_loader(self, count):
        """If every micro-batch is whole, a run is the same as with OpenRLHF's own loader."""
        samples = [Experience(sequences=torch.tensor([n]), attention_mask=torch.tensor([1])) for n in range(count)]
        (buffer,) = planned([samples], arguments(8))
        buffer.filler = samples[0]
        openrlhf = NaiveReplayBuffer(4)
        openrlhf.items = samples
        theirs = DataLoader(openrlhf, batch_size=4, shuffle=True, drop_last=True, collate_fn=openrlhf.collate_fn)
        result = []
        ours = lambda: [drawn.experience for drawn in buffer.loader(shuffle=True, pin_memory=False)]  # noqa: E731
        for loader in (ours, lambda: theirs):
            torch.manual_seed(3)
            epochs = [[batch.sequences.flatten().tolist() for batch in loader()] for _ in range(2)]
            result.append((epochs, torch.rand(2).tolist()))
        assert result[0] == result[1]

    def test_take_replaces_what_was_not_trained_on(self):
        def samples_of(count, value):
            return Experience(
                sequences=torch.full((count, 3), value),
                attention_mask=torch.ones(count, 3),
                info={"x": torch.ones(count)},
            )

        buffer = WholeBatchReplayBuffer(3)
        buffer.take(samples_of(2, 5), samples_of(1, 0), 2)
        buffer.take(samples_of(3, 6), samples_of(1, 7), 4)
        assert [item.sequences.tolist() for item in buffer.items] == [[6, 6, 6]] * 3 and buffer.total == 4
        buffer.take(None, samples_of(1, 8), 1)
        assert buffer.items == [] and buffer.filler.sequences.tolist() == [8, 8, 8]

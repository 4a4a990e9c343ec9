"""A batch of any size on any number of ranks: which rank trains on what, and in which optimizer step.

OpenRLHF's ranks are threads here; their collectives meet at a barrier.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from openrlhf.trainer.ppo_utils.experience import Experience
from ranks import Ranks, arguments
from test_updates import by_step
from torch.utils.data import DataLoader

from bapo_openrlhf.adapt.arithmetic import MicroBatch
from bapo_openrlhf.training.worker.whole_batch import WholeBatchReplayBuffer, micro_batches


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
    """The samples of each micro-batch, by optimizer step."""
    items, parts = [*buffer.items, buffer.filler], micro_batches(buffer.plan, shuffle=False)
    return by_step(buffer.plan, [[items[place] for place in places] for places in parts])


def shares(total: int, ranks: int) -> list[int]:
    """Samples of each rank, dealt one by one."""
    counts = [0] * ranks
    for sample in range(total):
        counts[sample % ranks] += 1
    return counts


def brute_force(total: int, ranks: int, size: int, train_batch: int) -> list[list[tuple[int, bool, int, int]]]:
    """The plans of all ranks, from samples that are dealt one by one, an optimizer step's worth at a time."""
    plans, left = [[] for _ in range(ranks)], total
    while left:
        taken = min(left, train_batch)
        left -= taken
        rows = []  # of each rank: sizes of its micro-batches in this step
        for count in shares(taken, ranks):
            row = []
            while count:
                row.append(min(count, size))
                count -= row[-1]
            rows.append(row)
        real = sum(len(row) for row in rows)
        longest = max(len(row) for row in rows)
        for plan, row in zip(plans, rows, strict=True):
            row += [0] * (longest - len(row))
            plan.extend((samples, place + 1 == longest, taken, real) for place, samples in enumerate(row))
    return plans


@st.composite
def batches(draw):
    ranks, size = draw(st.integers(1, 9) | st.sampled_from([16, 33])), draw(st.integers(1, 5))
    train_batch = ranks * size * draw(st.integers(1, 4))
    total = draw(st.integers(0, 3 * train_batch + 2) | st.integers(0, ranks))
    return total, ranks, size, train_batch


@given(case=batches())
@settings(max_examples=3 * settings.default.max_examples, derandomize=True, database=None)
def test_the_micro_batches_of_all_ranks_together(case):
    """They are of a fixed size, and the samples keep their order."""
    total, ranks, size, train_batch = case
    hands = [[sample(1) for _ in range(count)] for count in shares(total, ranks)]
    buffers = planned(hands, arguments(train_batch), size)
    plans = [[(m.samples, m.closes, m.step_samples, m.step_parts) for m in buffer.plan] for buffer in buffers]
    assert plans == brute_force(*case)
    assert [list(map(id, buffer.items)) for buffer in buffers] == [list(map(id, hand)) for hand in hands]


def test_a_plan_by_tokens_by_hand():
    """Two ranks, 4 samples a step, 5 and 4 samples: steps of 2 and 2 a rank, and of 1 and a filler."""
    a, b, c, d, e = map(sample, (2, 2, 6, 6, 9))
    f, g, h, i = map(sample, (2, 2, 2, 9))
    first, second = planned([[a, b, c, d, e], [f, g, h, i]], arguments(4, 12))
    # A long one beside a short one: a e b d c, and f i g h. 2 x 9 and 2 x 6 tokens: the first are too many.
    assert steps(first) == [[[e], [a]], [[d, b]], [[c]]]
    assert steps(second) == [[[i], [f]], [[g, h]], [["filler"]]]
    assert first.plan[-1] == MicroBatch(1, True, 1, 1) and second.plan[-1] == MicroBatch(0, True, 1, 1)
    # Packed, 9 + 2 tokens fit.
    assert steps(planned([[a, b, c, d, e], [f, g, h, i]], arguments(4, 12), packed=True)[0])[0] == [[e, a]]


@pytest.mark.parametrize("count", [4, 12, 24])
def test_order_and_random_numbers_are_those_of_openrlhfs_loader(count):
    """If every micro-batch is whole, a run is the same as with OpenRLHF's own loader."""
    one = torch.tensor([1])
    samples = [Experience(sequences=torch.tensor([n]), attention_mask=one, total_length=one) for n in range(count)]
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


def test_take_replaces_what_was_not_trained_on():
    def samples_of(count, value):
        tokens = torch.full((count, 3), value)
        return Experience(sequences=tokens, attention_mask=torch.ones(count, 3), info={"x": torch.ones(count)})

    buffer = WholeBatchReplayBuffer(3)
    buffer.take(samples_of(2, 5), samples_of(1, 0), 2)
    buffer.take(samples_of(3, 6), samples_of(1, 7), 4)
    assert [item.sequences.tolist() for item in buffer.items] == [[6, 6, 6]] * 3 and buffer.total == 4
    buffer.take(None, samples_of(1, 8), 1)
    assert buffer.items == [] and buffer.filler.sequences.tolist() == [8, 8, 8]

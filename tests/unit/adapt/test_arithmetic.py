"""Batch arithmetic against brute force and against the way OpenRLHF cuts a list into chunks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt import arithmetic
from bapo_openrlhf.adapt.arithmetic import BatchArithmetic, MicroBatch, deal, parts_by_tokens

many = settings(max_examples=3 * settings.default.max_examples, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("samples", "train_batch", "full"), [(8, 64, 64), (72, 64, 128), (512, 24, 512), (8, 1024, 512)]
)
def test_samples_of_full_optimizer_steps_by_hand(samples, train_batch, full):
    """The batch holds 512 at most: the last of 22 steps of 24 holds 8."""
    assert BatchArithmetic(1, 512, 64, train_batch, {"actor": 1}, 1).full_samples(samples) == full


@given(lengths=st.lists(st.integers(1, 5000), max_size=60), ranks=st.integers(1, 70))
@many
def test_samples_are_dealt_like_cards(lengths, ranks):
    """One rank after the other takes the shortest sample that is left; of equal ones the first."""
    left, hands = list(range(len(lengths))), [[] for _ in range(ranks)]
    for hand in itertools.cycle(hands):
        if not left:
            break
        shortest = left[0]
        for position in left:
            if lengths[position] < lengths[shortest]:
                shortest = position
        left.remove(shortest)
        hand.append(shortest)
    assert deal(lengths, ranks) == hands


@given(samples=st.integers(0, 40), ranks=st.integers(1, 50), size=st.integers(1, 6))
@many
def test_ranks_are_in_step_with_one_empty_part_at_most(samples, ranks, size):
    hands = deal([1] * samples, ranks)
    of_ranks = [arithmetic.in_parts(hand, size) for hand in hands]
    filled = arithmetic.in_step(of_ranks)
    assert len({len(parts) for parts in filled}) == 1
    for hand, before, after in zip(hands, of_ranks, filled, strict=True):
        assert list(itertools.chain(*before)) == hand
        assert all(len(part) == size for part in before[:-1]) and all(1 <= len(part) <= size for part in before)
        assert after == before or after == [*before, []]


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
@settings(max_examples=10 * settings.default.max_examples, derandomize=True, database=None)
def test_the_micro_batches_of_all_ranks_together(case):
    """The counts of a full batch, too: the rank with the most samples says how many micro-batches all take."""
    total, ranks, size, train_batch = case
    owns = shares(total, ranks)
    plans = [arithmetic.micro_batch_plan(total, count, ranks, size, train_batch) for count in owns]
    expected = brute_force(*case)
    assert [[(m.samples, m.closes, m.step_samples, m.step_parts) for m in plan] for plan in plans] == expected
    totals = [samples for _, closes, samples, _ in expected[0] if closes]
    assert arithmetic.step_totals(total, train_batch) == totals
    counts = BatchArithmetic(1, total, 64, train_batch, {"actor": ranks, "critic": 1}, size)
    assert counts.optimizer_steps == len(totals)
    assert counts.micro_batches() == len(range(0, max(owns), size))
    assert counts.micro_batches("critic") == len(range(0, total, size))


class TestPartsByTokens:
    @given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 60), st.booleans())
    def test_each_sample_once_and_no_part_is_too_large(self, lengths, most, padded):
        parts = parts_by_tokens(lengths, most, padded=padded)
        assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        for part in parts:
            tokens = [lengths[place] for place in part]
            assert len(part) == 1 or (max(tokens) * len(tokens) if padded else sum(tokens)) <= most

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(9, 30))
    def test_padded_parts_are_as_few_as_can_be(self, lengths, most):
        """Against every way to divide the samples into parts."""

        def ways(places):
            if not places:
                yield []
                return
            first, *rest = places
            for taken in itertools.chain(*(itertools.combinations(rest, n) for n in range(len(rest) + 1))):
                part = [lengths[place] for place in (first, *taken)]
                if max(part) * len(part) <= most:
                    for others in ways([place for place in rest if place not in taken]):
                        yield [part, *others]

        fewest = min(map(len, ways(range(len(lengths)))))
        assert len(parts_by_tokens(lengths, most, padded=True)) == fewest

    def test_by_hand(self):
        assert parts_by_tokens([5, 9, 2, 9, 1], 14, padded=False) == [[1, 0], [3, 2, 4]]

    def test_a_rank_with_fewer_micro_batches_gets_fillers(self):
        plan = arithmetic.token_plan([8, 3], [[3, 1], [1]], [3, 2], [5, 3])
        first = [MicroBatch(3, False, 8, 5), MicroBatch(1, False, 8, 5), MicroBatch(0, True, 8, 5)]
        assert plan == [*first, MicroBatch(1, False, 3, 3), MicroBatch(0, True, 3, 3)]

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


@given(samples=st.integers(0, 99), ranks=st.integers(1, 9), size=st.integers(1, 5), parts=st.integers(1, 4))
@many
def test_the_counts_of_a_full_batch(samples, ranks, size, parts):
    """The rank with the most samples says how many micro-batches all take."""
    window = ranks * size * parts
    counts = BatchArithmetic(1, samples, 64, window, {"actor": ranks, "critic": 1}, size)
    assert counts.optimizer_steps == len(range(0, samples, window))
    assert counts.micro_batches() == max(len(range(0, len(hand), size)) for hand in deal([1] * samples, ranks))
    assert counts.micro_batches("critic") == len(range(0, samples, size))


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
        plan = arithmetic.micro_batch_plan([8, 3], [[3, 1], [1]], [3, 2], [5, 3])
        first = [MicroBatch(3, False, 8, 5), MicroBatch(1, False, 8, 5), MicroBatch(0, True, 8, 5)]
        assert plan == [*first, MicroBatch(1, False, 3, 3), MicroBatch(0, True, 3, 3)]

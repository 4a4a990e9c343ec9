"""Batch arithmetic against brute force and against the way OpenRLHF cuts a list into chunks."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bapo_openrlhf.arithmetic import BatchArithmetic, batch_arithmetic


def arithmetic(ranks: dict[str, int], *, group_size=8, micro_train=1, micro_rollout=1, train_batch=8):
    return BatchArithmetic(
        group_size=group_size,
        capacity=64,
        rollout_groups=64,
        train_batch=train_batch,
        ranks=ranks,
        micro_train=micro_train,
        micro_rollout=micro_rollout,
    )


def fits(groups: int, group_size: int, ranks: dict[str, int], micro: int) -> bool:
    """Whether every model's samples are dealt out evenly and, where it trains, in whole micro-batches."""
    samples = groups * group_size
    for model, count in ranks.items():
        shares = [len(range(rank, samples, count)) for rank in range(count)]
        if len(set(shares)) != 1:
            return False
        if model != "reference" and shares[0] % micro:
            return False
    return True


class TestLeftOver:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize(("micro_train", "micro_rollout"), [(1, 4), (4, 8), (3, 5), (8, 3)])
    def test_is_what_openrlhf_does_not_hand_out(self, ranks, micro_train, micro_rollout):
        made = arithmetic({"actor": ranks}, micro_train=micro_train, micro_rollout=micro_rollout)
        for samples in range(1, 60):
            batches = [list(range(samples))[i : i + micro_rollout] for i in range(0, samples, micro_rollout)]
            size = -(-len(batches) // ranks)  # as OpenRLHF's launcher cuts a list
            shares = [list(itertools.chain(*batches[rank * size : (rank + 1) * size])) for rank in range(ranks)]
            trained = sum(len(batch) for share in shares for batch in DataLoader(share, micro_train, drop_last=True))
            assert made.left_over(samples, dynamic=False) == samples - trained

    @pytest.mark.parametrize(
        ("samples", "left"), [(512, 0), (511, 127), (250, 122), (128, 0), (127, 127), (600, 88), (0, 0)]
    )
    def test_with_dynamic_batching_by_hand(self, samples, left):
        # 64 groups of 8 are 4 optimizer steps of 128
        assert arithmetic({"actor": 2}, train_batch=128).left_over(samples, dynamic=True) == left


class TestQuantum:
    @pytest.mark.parametrize("group_size", [1, 2, 3, 4, 6, 8])
    def test_is_the_least_group_count_that_fits(self, group_size):
        for actor, critic, reference, micro in itertools.product(
            (1, 2, 3, 4), (None, 1, 2, 3), (None, 1, 4, 5), (1, 2, 3, 4)
        ):
            named = {"actor": actor, "critic": critic, "reference": reference}
            ranks = {model: count for model, count in named.items() if count}
            least = next(n for n in itertools.count(1) if fits(n, group_size, ranks, micro))
            made = arithmetic(ranks, group_size=group_size, micro_train=micro)
            assert made.quantum == least, (ranks, micro)

    @pytest.mark.parametrize("multiple", [1, 2, 3, 7])
    def test_every_multiple_fits_and_nothing_between(self, multiple):
        ranks = {"actor": 4, "critic": 2, "reference": 3}
        quantum = arithmetic(ranks, group_size=2, micro_train=3).quantum
        assert quantum == 6  # 12 samples: 4 ranks x 3
        assert fits(multiple * quantum, 2, ranks, 3)
        assert not any(fits(multiple * quantum + more, 2, ranks, 3) for more in range(1, quantum))

    # by hand: 8 ranks x 1 = one group of 8; 8 x 2 = 16 samples = 2 groups; 8 x 3 = 24 = 3 groups; 6 x 1: lcm(6, 8) = 24
    @pytest.mark.parametrize(("ranks", "micro", "groups"), [(8, 1, 1), (8, 2, 2), (8, 3, 3), (6, 1, 3), (1, 8, 1)])
    def test_by_hand(self, ranks, micro, groups):
        assert arithmetic({"actor": ranks}, micro_train=micro).quantum == groups


def chunks_of(items: list, ranks: int) -> list[list]:
    """OpenRLHF's rule for a call on all ranks: ceil(items / ranks) consecutive items each, to the last what is left."""
    size = -(-len(items) // ranks)
    return [items[rank * size : min((rank + 1) * size, len(items))] for rank in range(ranks)]


class TestShares:
    @pytest.mark.parametrize(
        "ranks",
        [
            {"actor": 1},
            {"actor": 2},
            {"actor": 4, "critic": 2},
            {"actor": 2, "critic": 3, "reference": 1},
            {"actor": 1, "critic": 1, "reference": 4},
            {"actor": 6, "critic": 4, "reference": 2},
        ],
        ids=str,
    )
    def test_each_models_ranks_get_equally_many_samples(self, ranks):
        rng = random.Random(4)
        for micro_rollout, micro_train, group_size in itertools.product((1, 2, 3, 5, 64), (1, 2, 3), (2, 3, 8)):
            made = arithmetic(ranks, group_size=group_size, micro_train=micro_train, micro_rollout=micro_rollout)
            for multiple in (1, 2, 3):
                samples = multiple * made.quantum * group_size
                batches = made.forward_batches([rng.randrange(9) for _ in range(samples)])
                assert sorted(itertools.chain(*batches)) == list(range(samples))
                assert all(0 < len(batch) <= micro_rollout for batch in batches)
                for count in ranks.values():
                    loads = [sum(map(len, chunk)) for chunk in chunks_of(batches, count)]
                    assert loads == [samples // count] * count

    @given(
        lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
        ranks=st.sampled_from([{"actor": 1}, {"actor": 2}, {"actor": 2, "critic": 3}, {"actor": 4, "critic": 2}]),
        micro=st.integers(1, 7),
    )
    def test_little_is_padded_and_ranks_are_about_as_busy(self, lengths, ranks, micro):
        made = arithmetic(ranks, micro_rollout=micro)
        lengths = lengths * made.shares
        batches = made.forward_batches(lengths)
        for count in ranks.values():
            chunks = chunks_of(batches, count)
            tokens = [sum(lengths[position] for batch in chunk for position in batch) for chunk in chunks]
            # each rank's n-th shortest is at most its neighbour's, and at least the neighbour's one before
            assert max(tokens) - min(tokens) <= (max(lengths) - min(lengths)) * made.shares // count
        for share in chunks_of(batches, made.shares):
            # no other way to cut this share's samples into passes of so many has less padding
            in_order = [lengths[position] for batch in share for position in batch]
            assert in_order == sorted(in_order)

    def test_by_hand(self):
        made = arithmetic({"actor": 2, "critic": 1}, micro_rollout=3)
        lengths = [5, 1, 4, 4, 9, 2, 8, 7, 6, 3]
        # by length: 1, 5, 9, 2, 3, 0, 8, 7, 6, 4; every other one to each share of 5, in passes of 3 + 2
        assert made.forward_batches(lengths) == [[1, 9, 3], [8, 6], [5, 2, 0], [7, 4]]

    def test_equal_lengths_keep_their_order(self):
        assert arithmetic({"actor": 1}, micro_rollout=3).forward_batches([7] * 5) == [[0, 1, 2], [3, 4]]

    def test_cutting_without_shares_would_be_uneven(self):
        # The case that shares exist for: 16 samples in passes of 6, two ranks, would be 12 and 4.
        plain = [list(range(start, min(start + 6, 16))) for start in range(0, 16, 6)]
        assert [sum(map(len, chunk)) for chunk in chunks_of(plain, 2)] == [12, 4]
        batches = arithmetic({"actor": 2}, micro_rollout=6).forward_batches([3] * 16)
        assert [sum(map(len, chunk)) for chunk in chunks_of(batches, 2)] == [8, 8]

    @pytest.mark.parametrize("samples", [1, 7, 13])
    def test_samples_that_cannot_be_shared_are_an_error(self, samples):
        with pytest.raises(ValueError, match=f"{samples} samples cannot be shared equally by 2 ranks"):
            arithmetic({"actor": 2}).forward_batches([3] * samples)


class TestOptimizerSteps:
    @pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 4), (2, 2), (4, 2), (8, 1)])
    def test_matches_counting_micro_batches_on_a_rank(self, ranks, micro):
        for accumulated in (1, 2, 3):
            train_batch = ranks * micro * accumulated
            made = arithmetic({"actor": ranks}, micro_train=micro, train_batch=train_batch)
            for groups in range(made.quantum, 12 * made.quantum, made.quantum):
                micro_batches = groups * 8 // ranks // micro
                steps = pending = 0
                for index in range(micro_batches):
                    pending += 1
                    if pending == accumulated or index + 1 == micro_batches:
                        steps, pending = steps + 1, 0
                assert made.micro_batches(groups) == micro_batches
                assert made.optimizer_steps(groups) == steps

    @pytest.mark.parametrize(("groups", "steps"), [(64, 4), (63, 4), (49, 4), (48, 3), (1, 1)])
    def test_by_hand_with_16_groups_a_step(self, groups, steps):
        assert arithmetic({"actor": 1}, train_batch=128).optimizer_steps(groups) == steps


class TestFromArguments:
    def args(self, *, critic="critic", kl=0.01, ring=1, tensor=1, batch=7):
        model = SimpleNamespace(num_nodes=2, num_gpus_per_node=4)
        return SimpleNamespace(
            actor=model,
            critic=SimpleNamespace(num_nodes=1, num_gpus_per_node=4, model_name_or_path=critic),
            ref=SimpleNamespace(num_nodes=1, num_gpus_per_node=2),
            algo=SimpleNamespace(kl=SimpleNamespace(init_coef=kl)),
            ds=SimpleNamespace(ring_attn_size=ring, tensor_parallel_size=tensor),
            adapt=SimpleNamespace(enabled=True, kl_target="reference", batch_size=batch),
            rollout=SimpleNamespace(n_samples_per_prompt=6, batch_size=10, micro_batch_size=3),
            train=SimpleNamespace(batch_size=48, micro_batch_size=2),
        )

    def test_takes_each_number_from_its_flag(self):
        assert batch_arithmetic(self.args()) == BatchArithmetic(
            group_size=6,
            capacity=7,
            rollout_groups=10,
            train_batch=48,
            ranks={"actor": 8, "critic": 4, "reference": 2},
            micro_train=2,
            micro_rollout=3,
        )

    def test_only_models_that_are_built_count(self):
        assert batch_arithmetic(self.args(critic=None)).ranks == {"actor": 8, "reference": 2}
        assert batch_arithmetic(self.args(kl=0.0)).ranks == {"actor": 8, "critic": 4}

    def test_copies_of_a_rank_do_not_count(self):
        assert batch_arithmetic(self.args(ring=2, tensor=2)).ranks == {"actor": 2, "critic": 1, "reference": 1}

    def test_capacity_is_the_rollout_batch_unless_adaptation_has_one_of_its_own(self):
        assert batch_arithmetic(self.args(batch=None)).capacity == 10
        plain = self.args()
        plain.adapt.enabled = False
        assert batch_arithmetic(plain).capacity == 10

"""Sizes of batches from OpenRLHF's flags."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from bapo_openrlhf.flags.checked import signal_between
from bapo_openrlhf.flags.config import AdaptConfig
from bapo_openrlhf.flags.sizes import batch_arithmetic, critic_steps, left_over, most_tokens, pretraining_steps


@pytest.mark.parametrize(("ends", "reward_range", "expected"), [
    ([0.5, 2.0], [-1, 3], (Fraction(3, 8), Fraction(3, 4))),
    ([0.1, 0.9], None, (Fraction(1, 10), Fraction(9, 10))),
    ([-math.inf, math.inf], [-1, 3], (-math.inf, math.inf)),
])  # fmt: skip
def test_a_signal_lies_between_the_ends_of_dynamic_filtering(ends, reward_range, expected):
    """In the range of the task's rewards, mapped to [0, 1] as groups are."""
    algo = SimpleNamespace(dynamic_filtering_enable=True, dynamic_filtering_range=ends)
    args = SimpleNamespace(algo=algo, adapt=AdaptConfig(reward_range=reward_range))
    assert signal_between(args) == expected
    algo.dynamic_filtering_enable = False
    assert signal_between(args) is None


class TestArithmetic:
    def args(self, *, critic=True, kl=0.01, tensor=1, batch=7, **adapt):
        model = SimpleNamespace(num_nodes=2, num_gpus_per_node=4)
        return SimpleNamespace(
            actor=model,
            critic=SimpleNamespace(num_nodes=1, num_gpus_per_node=4),
            ref=SimpleNamespace(num_nodes=1, num_gpus_per_node=2),
            algo=SimpleNamespace(
                kl=SimpleNamespace(init_coef=kl), dynamic_filtering_enable=False,
                advantage=SimpleNamespace(estimator="gae" if critic else "rloo"),
            ),
            reward=SimpleNamespace(remote_url="reward.py"),
            ds=SimpleNamespace(tensor_parallel_size=tensor),
            adapt=AdaptConfig(**{"method": "bapo", "batch_size": batch} | adapt),
            rollout=SimpleNamespace(n_samples_per_prompt=6, batch_size=10, micro_batch_size=3),
            train=SimpleNamespace(batch_size=48, micro_batch_size=2, dynamic_batch_enable=False),
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("adapt", "samples"),  # B = 7 groups of 6, and 10 fresh groups
        [
            ({}, 60 + 42),  # X2 and X3 may fill the batch beside 10 silent groups
            ({"replay_steps": 0, "reevaluate_every": 0}, 60),
            ({"replay_steps": 0, "reevaluate_every": 0, "batch": 20}, 120),  # as the control, whose batch is not full
            ({"filter": "none"}, 42),  # they have places in the batch
            ({"method": "mopps"}, 60 + 42),
        ],
    )
    def test_optimizer_steps_have_room_for_what_is_skipped(self, adapt, samples):
        found = batch_arithmetic(self.args(skip_zero_advantage=True, **adapt))
        assert found.optimizer_steps == -(-samples // 48) and found.most_samples == 6 * adapt.get("batch", 7)

    def test_models_that_are_not_built_and_copies_of_a_rank_do_not_count(self):
        assert batch_arithmetic(self.args(critic=False)).ranks == {"actor": 8, "ref": 2}
        assert batch_arithmetic(self.args(kl=0.0)).ranks == {"actor": 8, "critic": 4}
        assert batch_arithmetic(self.args(tensor=4)).ranks == {"actor": 2, "critic": 1, "ref": 1}

    def test_capacity_is_the_rollout_batch_unless_adaptation_has_one_of_its_own(self):
        assert batch_arithmetic(self.args(batch=None)).capacity == 10
        plain = self.args()
        plain.adapt.method = "none"
        assert batch_arithmetic(plain).capacity == 10


@pytest.mark.parametrize(
    ("limit", "dynamic", "tokens"), [(None, False, [None, None]), (None, True, [70, 60]), (50, False, [500, 500])]
)
def test_tokens_of_a_rank(limit, dynamic, tokens):
    """The processes of a tensor-parallel group share a micro-batch."""
    args = SimpleNamespace(
        adapt=SimpleNamespace(micro_batch_tokens=limit),
        train=SimpleNamespace(dynamic_batch_enable=dynamic, max_tokens_per_gpu=70),
        rollout=SimpleNamespace(max_tokens_per_gpu=60),
        ds=SimpleNamespace(tensor_parallel_size=1 if limit is None else 10),
    )
    assert [most_tokens(args, phase) for phase in ("train", "rollout")] == tokens


@pytest.mark.parametrize(("dynamic", "budget", "longest", "steps"), [
    (False, None, 24, 2 * 3 * 3 * 2 * 5),
    (True, None, 24, 2 * 3 * 3 * 2 * 20),
    (False, 12, 24, 2 * 3 * 3 * 2 * 10),
    (False, 11, 24, 2 * 3 * 3 * 2 * 15),
    (False, 11, None, 2 * 3 * 3 * 2 * 20),
])  # fmt: skip
def test_steps_of_the_critic_before_the_actors(dynamic, budget, longest, steps):
    """Passes x trainer steps x epochs x the critic's epochs x optimizer steps of all fresh responses.

    These are of up to four rounds of prompts, or of as many as a response has parts.
    """
    args = SimpleNamespace(
        adapt=SimpleNamespace(value_pretraining=2, critic_epochs=2, partial_rollout_tokens=budget),
        data=SimpleNamespace(max_len=44),
        algo=SimpleNamespace(dynamic_filtering_enable=dynamic),
        critic=SimpleNamespace(freezing_steps=2),
        rollout=SimpleNamespace(batch_size=10, n_samples_per_prompt=8, max_new_tokens=longest),
        train=SimpleNamespace(max_epochs=3, batch_size=16),
    )
    assert pretraining_steps(args) == steps


@pytest.mark.parametrize("every", [0, 2, 3])
@pytest.mark.parametrize(
    ("groups", "batch", "rounds"), [("batch", None, 1), ("generated", None, 1), ("generated", 5, 4)]
)
def test_steps_of_the_critic_are_counted_step_by_step(every, groups, batch, rounds):
    """4 prompts of 3 responses, 2 epochs (of the critic 6), optimizer steps of 5 samples, 7 trainer steps.

    The pretraining makes 3 passes.
    """
    args = SimpleNamespace(
        adapt=AdaptConfig(
            method="bapo", critic_groups=groups, batch_size=batch, reevaluate_every=every, max_reevaluated_prompts=3,
            value_pretraining=3, critic_epochs=3,
        ),
        algo=SimpleNamespace(
            dynamic_filtering_enable=rounds == 4, kl=SimpleNamespace(init_coef=0),
            advantage=SimpleNamespace(estimator="gae"),
        ),
        reward=SimpleNamespace(remote_url="reward.py"),
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=1),
        critic=SimpleNamespace(num_nodes=1, num_gpus_per_node=1, freezing_steps=-1),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
        rollout=SimpleNamespace(batch_size=4, n_samples_per_prompt=3),
        train=SimpleNamespace(max_epochs=2, batch_size=5, micro_batch_size=1),
    )  # fmt: skip
    capacity, wanted = batch or 4, 3 * 6 * math.ceil(rounds * 12 / 5)
    for step in range(7):
        again = 3 if every and step and step % every == 0 else 0
        wanted += 6 * math.ceil((capacity if groups == "batch" else rounds * 4 + again + capacity) * 3 / 5)
    assert critic_steps(args, 7 * 2 * math.ceil(capacity * 3 / 5)) == wanted


class TestLeftOver:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize(("micro_train", "micro_rollout"), [(1, 4), (4, 8), (3, 5), (8, 3)])
    def test_is_what_openrlhf_does_not_hand_out(self, ranks, micro_train, micro_rollout):
        args = TestArithmetic().args()
        args.actor = SimpleNamespace(num_nodes=1, num_gpus_per_node=ranks)
        args.rollout.micro_batch_size, args.train.micro_batch_size = micro_rollout, micro_train
        for samples in range(1, 60):
            batches = [list(range(samples))[i : i + micro_rollout] for i in range(0, samples, micro_rollout)]
            size = -(-len(batches) // ranks)  # as OpenRLHF's launcher cuts a list
            shares = [list(itertools.chain(*batches[rank * size : (rank + 1) * size])) for rank in range(ranks)]
            trained = sum(len(batch) for share in shares for batch in DataLoader(share, micro_train, drop_last=True))
            assert left_over(args, samples) == samples - trained

    @pytest.mark.parametrize(
        ("samples", "left"), [(512, 0), (511, 127), (250, 122), (128, 0), (127, 127), (600, 88), (0, 0)]
    )
    def test_with_dynamic_batching_by_hand(self, samples, left):
        """64 groups of 8 are 4 optimizer steps of 128."""
        args = TestArithmetic().args()
        args.rollout.batch_size, args.rollout.n_samples_per_prompt, args.train.batch_size = 64, 8, 128
        args.train.dynamic_batch_enable = True
        assert left_over(args, samples) == left

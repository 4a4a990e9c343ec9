"""Importance ratios, KL targets and advantages of a batch of three sources. Ray is not started."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from fractions import Fraction as F
from types import SimpleNamespace

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import ray  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from openrlhf.models.loss import PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ray import launcher  # noqa: E402

from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS  # noqa: E402
from bapo_openrlhf.adapt.batch import Batch  # noqa: E402
from bapo_openrlhf.adapt.first_update import Clip, first_update  # noqa: E402
from bapo_openrlhf.adapt.rewards import UNIT  # noqa: E402
from bapo_openrlhf.adapt.vocabulary import SOURCES  # noqa: E402
from bapo_openrlhf.training.trainer import experience as experience_module  # noqa: E402
from bapo_openrlhf.training.trainer.advantages import Discounts, corrected_returns, discounted_sums, gae, set_advantages  # noqa: E402
from bapo_openrlhf.training.trainer.dealing import DealtBatch  # noqa: E402
from bapo_openrlhf.training.trainer.experience import (  # noqa: E402
    BatchExperience,
    ExperienceMaker,
    SampleOrigin,
    old_log_probs,
    row_of,
    token_log_ratios,
)
from bapo_openrlhf.training.trainer.reference import ReferenceLogProbs  # noqa: E402

EPS = 1e-6
# One row a sample: a whole turn, padding, two turns, one token.
MASKS = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0]], dtype=torch.long)


@dataclass(frozen=True)
class Case:
    """Responses of a group, data-parallel ranks of actor and critic, and samples of a forward pass."""

    size: int = 4
    ranks: tuple[int, int] = (1, 1)
    micro: int = 3


def group_of(name: str, ranks: int) -> launcher.RayActorGroup:
    """OpenRLHF's group of a model's processes, which answer at once as `answer` says."""

    def execute(method: str, chunk: dict, start: int, end: int) -> list[torch.Tensor]:
        assert method == "forward" and (start, end) == (0, len(chunk["sequences"]))
        return [answer(sequences, name) for sequences in chunk["sequences"]]

    group = object.__new__(launcher.RayActorGroup)
    group._actor_handlers = [SimpleNamespace(execute_batch=SimpleNamespace(remote=execute)) for _ in range(ranks)]
    group.duplicate_actors = 1
    return group


def whole_group(number: int) -> SimpleNamespace:
    """A group with all responses that it was generated with, as far as the experience maker looks at it."""
    return SimpleNamespace(uid=number, relative_to="kept", reward_range=UNIT)


def response() -> SimpleNamespace:
    """A response that has no log-probs under a reference model yet."""
    return SimpleNamespace(extras={})


class WholeGroups(ExperienceMaker):
    """An experience maker that can be asked for the advantages of some samples right away.

    Attributes:
        groups: The group of each sample. Empty for groups of G responses in a row.
        log_ratios: For V-trace, of each experience.
    """

    groups, log_ratios = (), ()

    def with_advantages(self, experiences):
        count = sum(len(experience.index) for experience in experiences)
        size = self.args.rollout.n_samples_per_prompt
        groups = self.groups or [whole_group(n // size) for n in range(count)]
        options = {"kl_coefficient": self.kl_ctl.value, "critic_lambd": self.args.adapt.critic_lambd}
        set_advantages(experiences, groups, self.args, **options, log_ratios=self.log_ratios)
        return experiences


def maker(estimator: str = "group_norm", *, case: Case = Case(), kl: float = 0.0, **changed):
    """An experience maker of these arguments, whose models answer at once, without Ray."""
    args = SimpleNamespace(
        adapt=SimpleNamespace(
            micro_batch_tokens=None,
            eps=EPS,
            ratio="behaviour",
            kl_target="reference",
            returns="gae",
            critic_lambd=None,
            length_adaptive_lambd=None,
            critic_baseline="critic",
            max_second_moment=None,
        ),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False, is_correction_level="off"
            ),
            kl=SimpleNamespace(use_loss=False, estimator="k1"),
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=case.size, micro_batch_size=case.micro),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
        train=SimpleNamespace(dynamic_batch_enable=False),
        reward=SimpleNamespace(clip_range=(-10, 10), overlong_buffer_len=None, stop_properly_penalty_coef=None),
        actor=SimpleNamespace(policy_loss_type="ppo"),
    )
    for name, value in changed.items():
        parent, _, key = name.rpartition("__")
        node = args
        for part in parent.split("__"):
            node = getattr(node, part)
        setattr(node, key, value)
    models = group_of("action_log_probs", case.ranks[0]), group_of("values", case.ranks[1]), None
    return WholeGroups(args, *models, kl_ctl=SimpleNamespace(value=kl), pad=9)


def plain_maker(experience_maker: ExperienceMaker, *models) -> RemoteExperienceMaker:
    """OpenRLHF's maker with the same arguments."""
    tokenizer = SimpleNamespace(pad_token_id=experience_maker.pad)
    parts = experience_maker.kl_ctl, SimpleNamespace(args=experience_maker.args), tokenizer
    return RemoteExperienceMaker(*(models or [None] * 4), *parts)


def split(
    rewards: list[float], parts: list[list[int]], *, seed: int = 0, kl: float = 0.0, **rows: torch.Tensor
) -> list[Experience]:
    """Experience of samples in micro-batches `parts`, each with its own mask and per-token numbers."""
    rng = torch.Generator().manual_seed(seed)
    kls = kl * torch.rand((len(rewards), MASKS.shape[1]), generator=rng)
    values = torch.randn((len(rewards), MASKS.shape[1]), generator=rng)
    masks = MASKS[torch.arange(len(rewards)) % len(MASKS)]
    return [
        Experience(
            index=part,
            rewards=torch.tensor([rewards[index] for index in part]),
            action_mask=masks[part],
            kl=kls[part] * masks[part],
            values=values[part],
            info={},
        )
        for part in parts
    ]


def off_policy(parts: list[list[int]], seed: int = 7) -> list[np.ndarray]:
    """A log-ratio for each token of `split`'s micro-batches: far from today's policy."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return [rng.normal(0.0, 1.0, (len(part), MASKS.shape[1])) for part in parts]


def by_sample(experiences: list[Experience], name: str) -> dict[int, list[float]]:
    """A field's numbers at each sample's action tokens."""
    return {
        index: getattr(experience, name)[row][experience.action_mask[row].bool()].tolist()
        for experience in experiences
        for row, index in enumerate(experience.index)
    }


class TestOldLogProbs:
    def test_by_hand(self):
        recomputed = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
        stored = torch.tensor([[-0.1, -0.2], [-0.3, -0.4], [-0.5, -0.6]])
        result = old_log_probs(recomputed, stored, torch.tensor([True, False, True]))
        assert torch.equal(result, torch.tensor([[-1.0, -2.0], [-0.3, -0.4], [-5.0, -6.0]]).float())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_has_the_actors_type(self, dtype):
        result = old_log_probs(torch.zeros(1, 2, dtype=dtype), -torch.ones(1, 2), torch.tensor([False]))
        assert result.dtype == dtype and (result == -1).all()


class TestGroupAdvantages:
    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_closed_form(self, size):
        # k of G right: (1 - p) / sqrt(p (1 - p) + eps) for the right ones, -p / ... for the wrong ones, p = k / G
        rewards = [1.0 if sample % size < sample // size else 0.0 for sample in range(size * (size + 1))]
        order = np.random.default_rng(0).permutation(len(rewards)).tolist()
        parts = [order[start : start + 3] for start in range(0, len(order), 3)]
        experiences = maker(case=Case(size)).with_advantages(split(rewards, parts))
        actual = by_sample(experiences, "advantages")
        for sample, reward in enumerate(rewards):
            p = (sample // size) / size
            wanted = (reward - p) / math.sqrt(p * (1 - p) + EPS)
            assert actual[sample] == pytest.approx([wanted] * len(actual[sample]), rel=1e-6, abs=0)
            if 0 < p < 1 and reward:
                assert actual[sample][0] == pytest.approx(math.sqrt((1 - p) / p), rel=1e-4)  # sqrt((G - k) / k)

    def test_the_smoothing_is_that_of_the_run(self):
        """1/2 over sqrt(1/4 + 3/4)."""
        given = split([1.0, 0.0], [[0, 1]])
        actual = by_sample(maker(case=Case(2), adapt__eps=0.75).with_advantages(given), "advantages")
        assert (set(actual[0]), set(actual[1])) == ({0.5}, {-0.5})

    @pytest.mark.parametrize(
        "parts", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[5, 0], [3], [7, 1, 6], [2, 4]], [[n] for n in range(7, -1, -1)]]
    )
    @pytest.mark.parametrize("coefficient", [0.0, 0.3])
    def test_matches_a_slow_loop_with_kl_in_the_reward(self, parts, coefficient):
        rewards = [0.0, 1.0, 0.5, 0.25, -2.0, 3.0, 3.0, 0.1]
        given = split(rewards, parts, kl=0.8, seed=3)
        kls = {index: e.kl[row].tolist() for e in given for row, index in enumerate(e.index)}
        masks = {index: e.action_mask[row].tolist() for e in given for row, index in enumerate(e.index)}
        experiences = maker(kl=coefficient).with_advantages(given)
        advantages, returns = by_sample(experiences, "advantages"), by_sample(experiences, "returns")
        sums = {index: float(e.info["return"][row]) for e in experiences for row, index in enumerate(e.index)}
        for sample, reward in enumerate(rewards):
            group = rewards[sample // 4 * 4 :][:4]
            mean = sum(group) / 4
            variance = sum((r - mean) ** 2 for r in group) / 4
            total, wanted = (reward - mean) / math.sqrt(variance + EPS), []
            for position in reversed([n for n, used in enumerate(masks[sample]) if used]):
                total -= coefficient * kls[sample][position]
                wanted.append(total)
            assert advantages[sample] == pytest.approx(wanted[::-1], rel=1e-5, abs=1e-6)
            assert returns[sample] == advantages[sample]
            assert sums[sample] == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert all(experience.kl is None for experience in experiences)

    def test_the_gamma_of_a_critic_is_not_read(self):
        """It would discount the reward, which stands at the last token."""
        experiences = maker(case=Case(2), algo__advantage__gamma=0.5).with_advantages(split([1.0, 0.0], [[0, 1]]))
        for numbers in by_sample(experiences, "advantages").values():
            assert len(numbers) > 1 and len({*numbers}) == 1

    def test_rewards_that_cancel_have_no_advantage_at_the_size_of_their_range(self):
        for high, signal in ((1, False), (F(1, 10**9), True)):
            experience_maker = maker(case=Case(2), adapt__eps=1e-30)
            group = whole_group(0)
            group.reward_range = (F(0), F(high))
            experience_maker.groups = [group, group]
            experiences = experience_maker.with_advantages(split([0.0, 1e-9], [[0, 1]]))
            advantages = by_sample(experiences, "advantages")
            assert advantages[1] == pytest.approx([float(signal)] * len(advantages[1]))

    def test_groups_without_signal_have_no_advantage(self):
        experiences = maker().with_advantages(split([0.1] * 4 + [1.0] * 4, [[0, 5, 2, 7], [4, 1, 6, 3]]))
        assert all(value == 0 for values in by_sample(experiences, "advantages").values() for value in values)

    def test_spread_is_that_of_the_samples_own_group(self):
        experiences = maker().with_advantages(split([0.0, 1, 0, 1, 1, 1, 1, 1], [[7, 0], [4, 1, 2], [3, 5, 6]]))
        spread = {i: float(e.info["group_reward_std"][row]) for e in experiences for row, i in enumerate(e.index)}
        assert spread == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5, 4: 0.0, 5: 0.0, 6: 0.0, 7: 0.0}

    def test_length_penalties_come_first(self):
        # truncated responses get -1: the group is 1, 1, -1, -1 and not 1, 1, 1, 1
        (experience,) = split([1.0] * 4, [[0, 1, 2, 3]])
        experience.truncated = torch.tensor([False, False, True, True])
        (experience,) = maker(reward__stop_properly_penalty_coef=-1.0).with_advantages([experience])
        assert by_sample([experience], "advantages")[0] == pytest.approx([1.0] * 5, rel=1e-5)
        assert by_sample([experience], "advantages")[2] == pytest.approx([-1.0] * 4, rel=1e-5)

    def test_openrlhfs_own_up_to_the_sample_standard_deviation(self):
        rewards, parts = [0.0, 1.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0], [[5, 0, 3], [7, 1, 6], [2, 4]]
        ours = by_sample(maker().with_advantages(split(rewards, parts)), "advantages")
        theirs = plain_maker(maker()).compute_advantages_and_returns(split(rewards, parts))
        assert set(ours) == set(range(8))
        for sample, values in by_sample(theirs, "advantages").items():
            assert ours[sample] == pytest.approx([value * math.sqrt(4 / 3) for value in values], rel=1e-4)

    @pytest.mark.parametrize("estimator", sorted({*GROUP_ESTIMATORS} - {"group_norm"}))
    def test_other_group_estimators_are_openrlhfs(self, estimator):
        rewards, parts = [0.0, 1.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0], [[5, 0, 3], [7, 1, 6], [2, 4]]
        ours = maker(estimator).with_advantages(split(rewards, parts))
        theirs = plain_maker(maker(estimator)).compute_advantages_and_returns(split(rewards, parts))
        ours, theirs = by_sample(ours, "advantages"), by_sample(theirs, "advantages")
        assert all(ours[sample] == pytest.approx(theirs[sample], rel=1e-5, abs=1e-7) for sample in range(8))


@st.composite
def groups_of_any_size(draw) -> tuple[list[SimpleNamespace], list[float], list[list[int]]]:
    """Groups that hold some of the responses that they were generated with, the group of each sample, their rewards,
    and their micro-batches in any order."""
    reward, groups, rewards = st.sampled_from([0.0, 1.0, 0.25, -2.0]), [], []
    for uid in range(draw(st.integers(1, 4))):
        generated = draw(st.lists(reward, min_size=2, max_size=6))
        kept = sorted(draw(st.sets(st.sampled_from(range(len(generated))), min_size=1)))
        relative_to = draw(st.sampled_from(["generated", "kept"]))
        known = {"generated": generated, "relative_to": relative_to, "reward_range": UNIT}
        group = SimpleNamespace(uid=10 - uid, size=len(kept), **known)
        groups += [group] * len(kept)
        rewards += [generated[position] for position in kept]
    order = draw(st.permutations(range(len(rewards))))
    size = draw(st.integers(1, len(rewards)))
    return groups, rewards, [list(order[start : start + size]) for start in range(0, len(order), size)]


class TestGroupsOfAnySize:
    @given(drawn=groups_of_any_size(), estimator=st.sampled_from(["group_norm", "rloo", "dr_grpo"]))
    @settings(derandomize=True, database=None)
    def test_advantages_one_by_one(self, drawn, estimator):
        """A response by itself has its advantage still, unless it is compared only with itself."""
        groups, rewards, parts = drawn
        experience_maker = maker(estimator)
        experience_maker.groups = groups
        experiences = experience_maker.with_advantages(split(rewards, parts))
        actual = by_sample(experiences, "advantages")
        spread = {i: float(e.info["group_reward_std"][row]) for e in experiences for row, i in enumerate(e.index)}
        kept = [float(reward) for experience in experiences for reward in experience.rewards]
        assert kept == [rewards[index] for part in parts for index in part]  # the record reads them
        for sample, (group, group_rewards) in enumerate(zip(groups, rewards, strict=True)):
            of_group = [reward for other, reward in zip(groups, rewards, strict=True) if other is group]
            others = list(group.generated if group.relative_to == "generated" else of_group)
            mean, deviation = statistics.fmean(others), statistics.pstdev(others)
            others.remove(group_rewards)
            wanted = {
                "group_norm": (group_rewards - mean) / math.sqrt(deviation**2 + EPS),
                "rloo": group_rewards - statistics.fmean(others) if others else 0.0,
                "dr_grpo": group_rewards - mean,
            }[estimator]
            assert actual[sample] == pytest.approx([wanted] * len(actual[sample]), rel=1e-5, abs=1e-6)
            assert spread[sample] == pytest.approx(deviation, abs=1e-6)

    @given(drawn=groups_of_any_size(), returns=st.sampled_from(["gae", "vtrace"]))
    @settings(derandomize=True, database=None)
    def test_a_critic_sees_no_groups(self, drawn, returns):
        """GAE is OpenRLHF's own of single responses. With today's policy, V-trace is the same."""
        groups, rewards, parts = drawn
        changed = {"algo__advantage__lambd": 0.9, "kl": 0.1, "adapt__returns": returns}
        experience_maker = maker("gae", **changed)
        experience_maker.groups = groups
        experience_maker.log_ratios = [np.zeros((len(part), MASKS.shape[1])) for part in parts]
        ours = experience_maker.with_advantages(split(rewards, parts, kl=0.5))
        theirs = maker("gae", case=Case(1), **changed)
        theirs = plain_maker(theirs).compute_advantages_and_returns(split(rewards, parts, kl=0.5))
        for name in ("advantages", "returns"):
            actual, wanted = by_sample(ours, name), by_sample(theirs, name)
            assert all(actual[sample] == pytest.approx(wanted[sample], rel=1e-5, abs=1e-6) for sample in actual)

    def test_the_clip_range_is_of_what_the_estimator_makes(self):
        """Of the rewards 1, 0, 0, 0 less their mean."""
        experience_maker = maker("dr_grpo", reward__clip_range=(-0.125, 0.5))
        actual = by_sample(experience_maker.with_advantages(split([1.0, 0.0, 0.0, 0.0], [[0, 1, 2, 3]])), "advantages")
        assert [set(actual[sample]) for sample in range(4)] == [{0.5}, *[{-0.125}] * 3]

    def test_length_penalties_of_responses_that_are_gone_are_not_known(self):
        (experience,) = split([1.0], [[0]])
        experience.truncated = torch.tensor([True])
        known = {"generated": [1.0, 0.0], "relative_to": "generated", "reward_range": UNIT}
        group = SimpleNamespace(uid=7, size=1, **known)
        for estimator, fails in (("group_norm", True), ("gae", False)):
            experience_maker = maker(estimator, reward__stop_properly_penalty_coef=-1.0)
            experience_maker.groups = [group]
            experience_maker.log_ratios = [np.zeros((1, MASKS.shape[1]))]
            with pytest.raises(ValueError, match="group 7 holds only some") if fails else nullcontext():
                experience_maker.with_advantages([copy.deepcopy(experience)])
        experience_maker = maker(reward__stop_properly_penalty_coef=-1.0)
        experience_maker.groups = [SimpleNamespace(**vars(group) | {"relative_to": "kept"})]
        experience_maker.with_advantages([experience])
        assert experience.rewards.tolist() == [-1.0] and experience.advantages.count_nonzero() == 0


class TestCritic:
    def test_lambda_1_is_the_reward_minus_the_value(self):
        rewards, parts = [1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0], [[6, 1], [0, 3, 7], [2, 4, 5]]
        given = split(rewards, parts, seed=5)
        values = by_sample(given, "values")
        experience_maker = maker("gae")
        experience_maker.log_ratios = off_policy(parts)
        experiences = experience_maker.with_advantages(given)
        returns, advantages = by_sample(experiences, "returns"), by_sample(experiences, "advantages")
        raw = {sample: [rewards[sample] - value for value in values[sample]] for sample in values}
        tokens = [value for sample in raw for value in raw[sample]]
        mean = sum(tokens) / len(tokens)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
        for sample in raw:
            assert returns[sample] == pytest.approx([rewards[sample]] * len(raw[sample]), abs=1e-5)
            wanted = [(value - mean) / deviation for value in raw[sample]]
            assert advantages[sample] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        whitened = [value for sample in advantages for value in advantages[sample]]
        assert np.mean(whitened) == pytest.approx(0, abs=1e-5) and np.std(whitened) == pytest.approx(1, rel=1e-4)

    def test_equal_advantages_stay_finite(self):
        (given,) = split([1.0, 1.0], [[0, 1]])
        given.values = torch.zeros_like(given.values)
        advantages = by_sample(maker("gae", case=Case(2)).with_advantages([given]), "advantages")
        assert {number for numbers in advantages.values() for number in numbers} == {0.0}

    @pytest.mark.parametrize("no_std_norm", [False, True])
    def test_is_openrlhfs(self, no_std_norm):
        rewards, parts = [1.0, 0.0, 0.5, 1.0], [[3, 1], [0, 2]]
        changed = {"algo__advantage__lambd": 0.9, "algo__advantage__gamma": 0.97, "kl": 0.1}
        changed["algo__advantage__no_std_norm"] = no_std_norm
        experience_maker = maker("gae", **changed)
        experience_maker.log_ratios = off_policy(parts)
        ours = experience_maker.with_advantages(split(rewards, parts, kl=1.0))
        theirs = plain_maker(experience_maker).compute_advantages_and_returns(split(rewards, parts, kl=1.0))
        for name in ("advantages", "returns"):
            assert by_sample(ours, name) == by_sample(theirs, name)


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 30)),
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lambd=st.sampled_from([1.0, 0.95, 0.0]),
    seed=st.integers(0, 99),
)
@settings(derandomize=True, database=None)
def test_sums_over_tokens_are_openrlhfs_to_the_last_bit(shape, gamma, lambd, seed):
    rng = torch.Generator().manual_seed(seed)
    values, rewards = torch.randn(2, *shape, generator=rng)
    mask, experience_maker = torch.rand(shape, generator=rng) < 0.7, maker("gae")
    theirs = RemoteExperienceMaker.get_advantages_and_returns(
        experience_maker, values, rewards, mask.long(), gamma, lambd
    )
    for ours, wanted in zip(gae(values, rewards, mask, Discounts(gamma, lambd, lambd)), theirs, strict=True):
        assert torch.equal(ours, wanted)
    wanted = RemoteExperienceMaker.get_cumulative_returns(experience_maker, rewards, mask.long(), gamma)
    assert torch.equal(discounted_sums(mask * rewards, gamma), wanted)


def by_kind(kind: str):
    """GAE or V-trace, which has one argument more: the log ratios."""
    if kind == "vtrace":
        return corrected_returns
    return lambda values, rewards, mask, log_ratios, discounts: gae(values, rewards, mask, discounts)


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 30)),
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lambdas=st.tuples(*[st.sampled_from([1.0, 0.95, 0.3, 0.0])] * 2),
    kind=st.sampled_from(["gae", "vtrace"]),
    seed=st.integers(0, 999),
)
@settings(derandomize=True, database=None, max_examples=3 * settings.default.max_examples)
def test_two_lambdas_are_the_definition(shape, gamma, lambdas, kind, seed):
    """Each token's advantage and return as a sum over all tokens that follow. V-trace is on policy here."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, shape[1] + 1, shape[0])
    mask = (np.arange(shape[1]) < lengths[:, None]) & (rng.random(shape) < 0.8)  # of several turns
    values, rewards = rng.normal(size=(2, *shape)) * mask
    actor, critic = lambdas
    given = [torch.from_numpy(numbers + 7.0 * ~mask).float() for numbers in (values, rewards)]  # masked ones count not
    result = by_kind(kind)(*given, torch.from_numpy(mask), np.zeros(shape), Discounts(gamma, *lambdas))
    for row in range(shape[0]):
        v, r = [*values[row], 0.0], rewards[row]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(shape[1])]
        for t in range(shape[1]):
            ahead = range(t, shape[1])
            advantage = sum((gamma * actor) ** (i - t) * delta[i] for i in ahead)
            target = v[t] + sum((gamma * critic) ** (i - t) * delta[i] for i in ahead)
            assert result[0][row, t] == pytest.approx(advantage, abs=1e-4)
            assert result[1][row, t] == pytest.approx(target, abs=1e-4)


def test_targets_of_vc_ppo_are_the_rewards():
    """With gamma = lambda_critic = 1 each token's target is its response's reward, whatever the advantages are."""
    rewards, parts = [1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0], [[6, 1], [0, 3, 7], [2, 4, 5]]
    plain, two = (
        maker("gae", algo__advantage__lambd=0.95, adapt__critic_lambd=critic).with_advantages(split(rewards, parts))
        for critic in (None, 1.0)
    )
    assert by_sample(two, "advantages") == by_sample(plain, "advantages")
    for sample, targets in by_sample(two, "returns").items():
        assert targets == pytest.approx([rewards[sample]] * len(targets), abs=1e-5)
    assert by_sample(two, "returns") != by_sample(plain, "returns")


# --- make_experience --------------------------------------------------------------------------------------------------

PARTS = [[2, 0], [3, 1]]  # micro-batches of a batch of four samples
ON_POLICY = [True, False, False, True]


@pytest.fixture
def made_by_openrlhf(monkeypatch):
    """OpenRLHF's `make_experience` gives these experiences: log-probs of today and of alpha, KL to the reference."""
    rng = torch.Generator().manual_seed(1)
    current, behaviour, reference = -torch.rand((3, 4, 6), generator=rng)
    experiences = [
        Experience(
            index=part,
            action_mask=MASKS[part],
            action_log_probs=current[part].clone(),
            rollout_log_probs=behaviour[part] * MASKS[part],
            base_action_log_probs=reference[part].clone(),
            kl=(current - reference)[part],
            info={"kl": torch.full((2,), 77.0)},
        )
        for part in PARTS
    ]
    asked = []
    monkeypatch.setattr(
        ExperienceMaker, "_pass", lambda self, dealt, known, **_: asked.append(dealt.batches) or experiences
    )
    return SimpleNamespace(current=current, behaviour=behaviour * MASKS, reference=reference, asked=asked)


def whole(experience_maker: ExperienceMaker, origins: list[SampleOrigin], samples=(), kept=None) -> BatchExperience:
    """The experience of these samples, without advantages. `kept` are the positions of those that stay; None: all."""

    def note(experiences, groups, args, *, log_ratios, **_):
        """The advantages may be asked for afterwards."""
        experience_maker.groups, experience_maker.log_ratios = groups, log_ratios
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experience_module, "set_advantages", note)
        patch.setattr(experience_module, "source_tokens", lambda *_: None)
        passed = experience_maker.forward(with_samples(samples, origins))
        return experience_maker.finish(passed, range(len(origins)) if kept is None else kept)


def with_samples(samples: list[Experience], origins: list[SampleOrigin]) -> list[SimpleNamespace]:
    """The origins, as if their responses were these samples."""
    return [
        SimpleNamespace(**vars(origin), sample=lambda sample=sample: sample)
        for origin, sample in itertools.zip_longest(origins, samples)
    ]


def make(made_by_openrlhf, **changed) -> tuple[BatchExperience, dict[int, SimpleNamespace]]:
    """The experience, and the rows of each sample."""
    experience_maker = maker(**changed)
    experience_maker._deal = lambda samples: SimpleNamespace(batches=["the batches"])
    experience_maker = whole(
        experience_maker,
        [SampleOrigin("fresh" if on else "replayed", on, whole_group(0), response()) for on in ON_POLICY],
    )
    assert made_by_openrlhf.asked == [["the batches"]]
    experiences = experience_maker.experiences
    names = ("action_log_probs", "base_action_log_probs", "rollout_log_probs", "kl")
    return experience_maker, {
        index: SimpleNamespace(**{name: getattr(e, name)[row] for name in names}, info_kl=float(e.info["kl"][row]))
        for e in experiences
        for row, index in enumerate(e.index)
    }


class TestMakeExperience:
    def test_behaviour_mode_replaces_the_off_policy_rows_alone(self, made_by_openrlhf):
        _, rows = make(made_by_openrlhf)
        for sample, on_policy in enumerate(ON_POLICY):
            wanted = made_by_openrlhf.current if on_policy else made_by_openrlhf.behaviour
            assert torch.equal(rows[sample].action_log_probs, wanted[sample])

    def test_decoupled_mode_replaces_none(self, made_by_openrlhf):
        _, rows = make(made_by_openrlhf, adapt__ratio="decoupled")
        for sample in range(4):
            assert torch.equal(rows[sample].action_log_probs, made_by_openrlhf.current[sample])
            assert torch.equal(rows[sample].rollout_log_probs, made_by_openrlhf.behaviour[sample])

    @pytest.mark.parametrize("ratio", ["behaviour", "decoupled"])
    def test_log_ratios_by_sample(self, made_by_openrlhf, ratio):
        batch, _ = make(made_by_openrlhf, adapt__ratio=ratio)
        wanted = [
            sum(
                float(made_by_openrlhf.current[sample][position] - made_by_openrlhf.behaviour[sample][position])
                for position in range(6)
                if MASKS[sample][position]
            )
            for sample in range(4)
        ]
        assert batch.log_ratios.tolist() == pytest.approx(wanted, abs=1e-5)

    def test_kl_to_the_reference_is_left_alone(self, made_by_openrlhf):
        _, rows = make(made_by_openrlhf)
        for sample in range(4):
            assert torch.equal(rows[sample].base_action_log_probs, made_by_openrlhf.reference[sample])
            assert torch.equal(rows[sample].kl, (made_by_openrlhf.current - made_by_openrlhf.reference)[sample])
            assert rows[sample].info_kl == 77.0

    @pytest.mark.parametrize("ratio", ["behaviour", "decoupled"])
    def test_kl_to_the_behaviour_policy_in_the_loss(self, made_by_openrlhf, ratio):
        _, rows = make(made_by_openrlhf, adapt__kl_target="behaviour", algo__kl__use_loss=True, adapt__ratio=ratio)
        for sample in range(4):
            assert torch.equal(rows[sample].base_action_log_probs, made_by_openrlhf.behaviour[sample])
            assert torch.equal(rows[sample].kl, (made_by_openrlhf.current - made_by_openrlhf.reference)[sample])

    @pytest.mark.parametrize("ratio", ["behaviour", "decoupled"])
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    def test_kl_to_the_behaviour_policy_in_the_reward(self, made_by_openrlhf, estimator, ratio):
        formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
        changed = {"adapt__kl_target": "behaviour", "algo__kl__estimator": estimator, "adapt__ratio": ratio}
        _, rows = make(made_by_openrlhf, **changed)
        for sample in range(4):
            # against today's log-probs, also where they are replaced as the old ones
            log_ratio = (made_by_openrlhf.current - made_by_openrlhf.behaviour)[sample].tolist()
            wanted = [formula(d) if on else 0.0 for d, on in zip(log_ratio, MASKS[sample].tolist(), strict=True)]
            assert rows[sample].kl.tolist() == pytest.approx(wanted, abs=1e-6)
            assert rows[sample].info_kl == pytest.approx(sum(wanted) / int(MASKS[sample].sum()), abs=1e-6)
            assert torch.equal(rows[sample].base_action_log_probs, made_by_openrlhf.reference[sample])


class TestSplit:
    def samples(self, count: int) -> list[Experience]:
        return [
            Experience(
                sequences=torch.full((1, 2 + n % 3), n),
                attention_mask=torch.ones((1, 2 + n % 3), dtype=torch.long),
                action_mask=torch.ones((1, 1 + n % 3), dtype=torch.long),
                rewards=torch.tensor([float(n)]),
                prompts=[str(n)],
                info={"n": torch.tensor([n])},
            )
            for n in range(count)
        ]

    def test_like_lengths_together_with_index_and_padding(self):
        batches = maker(case=Case(ranks=(2, 1)))._deal(self.samples(8)).batches
        # of 2, 3, 4, 2, 3, 4, 2 and 3 tokens: by length 0, 3, 6, 1, 4, 7, 2, 5
        assert [batch.index for batch in batches] == [[0, 6, 4], [2], [3, 1, 7], [5]]
        assert batches[0].sequences.tolist() == [[0, 0, 9], [6, 6, 9], [4, 4, 4]]  # padded with 9
        assert batches[0].action_mask.tolist() == [[1, 0], [1, 0], [1, 1]]
        assert batches[2].rewards.tolist() == batches[2].info["n"].tolist() == [3, 1, 7]
        assert batches[3].prompts == ["5"]

    @pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (3, 2), (2, 3)])
    @pytest.mark.parametrize("micro", [1, 4, 5, 100])
    @pytest.mark.parametrize("count", [1, 2, 7, 23, 24])
    def test_the_ranks_of_each_model_get_shares_that_differ_by_one(self, ranks, micro, count):
        experience_maker = maker(case=Case(ranks=ranks, micro=micro))
        dealt = experience_maker._deal(self.samples(count))
        batches = dealt.batches
        assert sorted(index for batch in batches for index in batch.index) == list(range(count))
        for group, number in zip((experience_maker.actor, experience_maker.critic), ranks, strict=True):
            loads: list[list[torch.Tensor]] = []

            def execute(method, chunk, start, end, loads=loads):
                lists = chunk["sequences"], chunk["action_mask"]
                loads.append([sequences[mask.any(-1)] for sequences, mask in zip(*lists, strict=True)])
                return [mask.float() for mask in chunk["action_mask"]]

            for handler in group._actor_handlers:
                handler.execute_batch.remote = execute
            with without_ray():
                answers = dealt.in_batches(dealt.ask(group)())
            shares = [sum(map(len, load)) for load in loads]
            assert len(shares) == number and sum(shares) == count and max(shares) - min(shares) <= 1
            assert {len(load) for load in loads} == {math.ceil(max(shares) / micro)}
            numbers = [int(row[0]) for load in loads for sequences in load for row in sequences]
            assert sorted(numbers) == list(range(count))  # a filler has no action token
            for answer, batch in zip(answers, batches, strict=True):
                assert torch.equal(answer, batch.action_mask.float())


class TestPass:
    """What the models say of a batch, beside OpenRLHF's own `make_experience`."""

    MODELS = ("actor", "critic", "initial")

    def models(self, calls: list, *, reference: bool, critic: bool):
        """The groups of the models, which note who is called with what."""

        def group(name: str, field: str) -> launcher.RayActorGroup:
            def execute(method, chunk, start, end):
                calls.append((name, method, sorted(chunk)))
                return [answer(sequences, field) for sequences in chunk["sequences"]]

            def call(method, *_, **__):
                calls.append((name, method))

            subject = object.__new__(launcher.RayActorGroup)
            subject._actor_handlers = [
                SimpleNamespace(
                    execute_batch=SimpleNamespace(remote=execute),
                    empty_cache=SimpleNamespace(remote=lambda: call("empty_cache")),
                )
            ]
            subject.duplicate_actors = 1
            return subject

        return (
            group("actor", "action_log_probs"),
            group("critic", "values") if critic else None,
            None,
            group("initial", "base_action_log_probs") if reference else None,
        )

    @pytest.mark.parametrize("kl", ["k1", "k2", "k3", "loss"])
    @pytest.mark.parametrize(("reference", "critic"), [(True, False), (True, True), (False, True)])
    @pytest.mark.parametrize("colocated", [None, "colocate_all", "colocate_actor_ref", "colocate_critic_reward"])
    def test_is_openrlhfs(self, kl, reference, critic, colocated):
        places = dict.fromkeys(["colocate_all", "colocate_actor_ref", "colocate_critic_reward"], False)
        changed = {f"train__{name}": name == colocated for name in places}
        changed |= {"algo__kl__use_loss": True} if kl == "loss" else {"algo__kl__estimator": kl}
        samples = [generated(n) for n in range(5)]
        ours, theirs = [], []
        with without_ray():
            experience_maker = maker(**changed)
            actor, critic_model, _, reference_model = self.models(ours, reference=reference, critic=critic)
            experience_maker.actor, experience_maker.critic = actor, critic_model
            experience_maker.reference = reference_model
            dealt = experience_maker._deal(copy.deepcopy(samples))
            plain = plain_maker(experience_maker, *self.models(theirs, reference=reference, critic=critic))
            wanted = plain.make_experience(copy.deepcopy(dealt.batches))
            known = ReferenceLogProbs("r", [SimpleNamespace(extras={}) for _ in samples])
            actual = experience_maker._pass(dealt, known)
        assert ours == theirs
        flag = dict.fromkeys(self.MODELS, "colocate_actor_ref") | {"critic": "colocate_critic_reward"}
        there = [name for name, present in zip(self.MODELS, (True, critic, reference), strict=True) if present]
        emptied = [name for name in there if colocated in ("colocate_all", flag[name])]
        assert [call for call in ours if call[1] == "empty_cache"] == [(name, "empty_cache") for name in emptied]
        for one, other in zip(actual, wanted, strict=True):
            mask = one.action_mask.bool()
            for name in ("action_log_probs", "base_action_log_probs", "values", "kl"):
                mine, openrlhfs = getattr(one, name), getattr(other, name)
                assert (mine is None) is (openrlhfs is None), name
                assert mine is None or torch.equal(mine[mask], openrlhfs[mask]), name
            assert list(one.info) == list(other.info)
            for name in ("kl", "logprobs_diff"):
                assert torch.equal(one.info[name], other.info[name]), name


def test_a_response_without_generated_tokens_has_no_kl():
    """An agent's executor may return one."""
    batch = Experience(
        action_mask=torch.tensor([[1, 1, 0], [0, 0, 0]]), action_log_probs=torch.full((2, 3), -1.0), info={}
    )
    maker()._set_kl(batch, torch.full((2, 3), -1.5))
    assert [batch.info[name].tolist() for name in ("kl", "logprobs_diff")] == [[0.5, 0.0]] * 2


# --- samples that leave the batch -------------------------------------------------------------------------------------

PAD = 9
STEP = ("action_log_probs", "base_action_log_probs", "rollout_log_probs", "values", "kl")  # (B, A), made by models


def generated(number: int, seed: int = 0) -> Experience:
    """A sample with everything a generator gives; prompt, response and turns of random lengths."""
    rng = np.random.Generator(np.random.PCG64([seed, number]))
    prompt, response = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    mask = torch.tensor([[0] * (prompt - 1) + [1] * response])
    if response > 3:
        mask[0, prompt + 1] = 0  # what the environment said between two turns
    size = prompt + response
    return Experience(
        sequences=torch.from_numpy(rng.integers(10, 99, (1, size))),
        attention_mask=torch.ones((1, size), dtype=torch.long),
        action_mask=mask,
        rollout_log_probs=torch.from_numpy(-rng.exponential(size=(1, size - 1))).float() * mask,
        rewards=torch.tensor([float(rng.integers(0, 5)) / 4]),
        scores=torch.tensor([float(number)]),
        response_length=torch.tensor([response]),
        truncated=torch.tensor([number % 3 == 0]),
        total_length=torch.tensor([float(size)]),
        prompts=[f"prompt {number}"],
        labels=[number],
        images=[[f"{number}.png"] if number % 2 else None],
        mm_train_inputs=[{"pixel_values": torch.full((2, 3), float(number))} if number % 2 else None],
        info={"reward": torch.tensor([float(number)]), "extra": torch.tensor([[0.5 * number]])},
    )


def answer(sequences: torch.Tensor, name: str) -> torch.Tensor:
    """A model's numbers, (B, A): they depend on a sample's tokens only; there are some for padding, too."""
    tokens = sequences[:, 1:].double()
    return -(((tokens * 7 + torch.arange(tokens.shape[1]) * 3 + STEP.index(name)) % 11) / 8).float()


def forward(samples: list[Experience]) -> list[Experience]:
    """In the place of OpenRLHF's models, batch by batch."""
    for batch in samples:
        for name in STEP:
            if name != "rollout_log_probs":
                setattr(batch, name, answer(batch.sequences, name))
        batch.info["kl"] = (batch.kl * batch.action_mask).sum(-1)
    return samples


def by_the_models(self: ExperienceMaker, dealt: DealtBatch, known: object, **_: object) -> list[Experience]:
    """The same, and actor and critic are asked."""
    batches = forward(dealt.batches)
    for name, model in {"action_log_probs": self.actor, "values": self.critic}.items():
        for batch, actual in zip(batches, dealt.in_batches(dealt.ask(model)()), strict=True):
            setattr(batch, name, actual)
    return batches


@contextmanager
def without_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", lambda refs: refs)
        patch.setattr(ray, "put", lambda value: value)
        yield patch


def assert_same_rows(actual: list[Experience], wanted: list[Experience]) -> None:
    """Equal in every field; `actual` may be padded further."""
    assert [len(batch.sequences) for batch in actual] == [len(batch.sequences) for batch in wanted]
    for one, other in zip(actual, wanted, strict=True):
        for item in fields(Experience):
            ours, theirs, name = getattr(one, item.name), getattr(other, item.name), item.name
            if name in ("sequences", "attention_mask", "action_mask"):
                width = theirs.shape[1]
                assert torch.equal(ours[:, :width], theirs), name
                assert (ours[:, width:] == (PAD if name == "sequences" else 0)).all(), name
            elif Experience.is_step_tensor_field(name) and theirs is not None:
                assert torch.equal(ours[one.action_mask.bool()], theirs[other.action_mask.bool()]), name
            else:
                assert repr(ours) == repr(theirs), name


def whole_batch(count: int = 5) -> Experience:
    """A batch with every field of an experience filled."""
    (batch,) = forward([Experience.concat_experiences([generated(n) for n in range(count)], PAD)])
    batch.returns, batch.advantages = batch.values + 1, batch.values + 2
    batch.index = list(range(10, 10 + count))
    assert all(getattr(batch, item.name) is not None for item in fields(Experience))
    return batch


class TestRowOf:
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_rows_put_together_again_are_the_batch(self, count):
        batch = whole_batch(count)
        again = Experience.concat_experiences([row_of(batch, row) for row in range(count)], PAD)
        for item in fields(Experience):
            ours, theirs = getattr(again, item.name), getattr(batch, item.name)
            assert type(ours) is type(theirs) and repr(ours) == repr(theirs), item.name
            if isinstance(theirs, torch.Tensor):
                assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, item.name

    @pytest.mark.parametrize("row", range(5))
    def test_has_every_field_of_its_sample(self, row):
        batch, sample = whole_batch(), generated(row)
        result = row_of(batch, row)
        width = sample.sequences.shape[1]
        assert result.index == [10 + row] and result.prompts == sample.prompts and result.labels == sample.labels
        assert torch.equal(result.sequences[:, :width], sample.sequences)
        assert result.sequences.shape == (1, batch.sequences.shape[1])
        for name in ("rewards", "scores", "response_length", "truncated", "total_length"):
            assert torch.equal(getattr(result, name), getattr(sample, name)), name
        assert torch.equal(result.info["reward"], sample.info["reward"])
        assert torch.equal(result.info["extra"], sample.info["extra"]) and result.info["kl"].shape == (1,)
        assert result.images == sample.images and repr(result.mm_train_inputs) == repr(sample.mm_train_inputs)
        for name in (*STEP, "returns", "advantages"):
            assert torch.equal(getattr(result, name), getattr(batch, name)[row : row + 1]), name

    def test_what_is_not_there_stays_so(self):
        batch = whole_batch(2)
        batch.base_action_log_probs = batch.scores = batch.values = None
        batch.images, batch.mm_train_inputs = [], []
        result = row_of(batch, 1)
        assert result.base_action_log_probs is result.scores is result.values is None
        assert result.images == [] and result.mm_train_inputs == [] and result.labels == [1]

    def test_leaves_the_batch_alone(self):
        batch = whole_batch()
        before = repr(batch)
        result = row_of(batch, 2)
        result.prompts.append("x")
        result.info["new"] = 1
        assert repr(batch) == before


class TestTokenLogRatios:
    def test_by_hand(self):
        batch = Experience(
            action_mask=torch.tensor([[1, 0, 1], [0, 1, 0]]),
            action_log_probs=torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, math.nan]]),
            rollout_log_probs=torch.tensor([[-1.5, 0.0, -1.0], [0.0, -5.0, 0.0]]),
        )
        result = token_log_ratios(batch)
        assert result.tolist() == [[0.5, 0.0, -2.0], [0.0, 0.0, 0.0]] and result.dtype == torch.float64

    def test_what_is_no_number_is_seen(self):
        batch = Experience(
            action_mask=torch.tensor([[1, 1]]),
            action_log_probs=torch.tensor([[math.nan, -math.inf]]),
            rollout_log_probs=torch.tensor([[-1.0, -1.0]]),
        )
        assert not token_log_ratios(batch).isfinite().any()

    def test_is_taken_in_float64(self):
        # summed over a long response, the rounding of float32 would add up
        batch = Experience(
            action_mask=torch.ones((1, 1), dtype=torch.long),
            action_log_probs=torch.tensor([[-16.000001]]),
            rollout_log_probs=torch.tensor([[-1e-7]]),
        )
        assert token_log_ratios(batch).item() == float(np.float32(-16.000001)) - float(np.float32(-1e-7))


@st.composite
def reviews(draw):
    """A case, the number of groups before the review, and the groups that stay: any of them, at least one."""
    ranks = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    case = Case(draw(st.integers(1, 4)), ranks, draw(st.integers(1, 5)))
    groups = draw(st.integers(1, 12))
    kept = sorted(draw(st.permutations(range(groups)))[: draw(st.integers(1, groups))])
    return case, groups, kept, draw(st.integers(0, 1000))


def made_of(
    case: Case, samples: list[Experience], origins: list[SampleOrigin], kept=None, **changed
) -> tuple[ExperienceMaker, BatchExperience]:
    """The experience of these samples, with `by_the_models` in the place of the models.

    The maker can compute the advantages afterwards.
    """
    experience_maker = maker(case=case, **changed)
    with without_ray() as patch:
        patch.setattr(ExperienceMaker, "_pass", by_the_models)
        experience = whole(experience_maker, origins, copy.deepcopy(samples), kept)
    return experience_maker, experience


def origins_of(count: int, size: int = 4) -> list[SampleOrigin]:
    """Of all sources within each group."""
    return [SampleOrigin(SOURCES[n % 3], n % 2 == 0, whole_group(n // size), response()) for n in range(count)]


def positions(groups: list[int], size: int) -> list[int]:
    return [group * size + row for group in groups for row in range(size)]


class TestReview:
    @given(drawn=reviews())
    @settings(derandomize=True, database=None)
    def test_is_as_if_the_others_had_never_been_in_the_batch(self, drawn):
        case, groups, groups_kept, seed = drawn
        size = case.size
        samples = [generated(n, seed) for n in range(groups * size)]
        origins, kept = origins_of(len(samples), size), positions(groups_kept, size)
        changed = {"estimator": "gae", "adapt__returns": "vtrace", "kl": 0.1}
        created, reviewed = made_of(case, samples, origins, kept, **changed)
        maker_of_kept, without = made_of(case, [samples[n] for n in kept], [origins[n] for n in kept], **changed)
        actual, wanted = reviewed.experiences, without.experiences
        assert [batch.index for batch in actual] == [batch.index for batch in wanted]
        assert sorted(index for batch in actual for index in batch.index) == list(range(len(kept)))
        assert_same_rows(actual, wanted)
        assert all(one.response is origins[n].response for one, n in zip(reviewed.origins, kept, strict=True))
        assert reviewed.log_ratios.tolist() == without.log_ratios.tolist()
        # they are the log ratios of the samples, in order
        for place, (log_ratio, n) in enumerate(zip(reviewed.log_ratios, kept, strict=True)):
            (one,) = forward([copy.deepcopy(samples[n])])
            difference = (one.action_log_probs.double() - one.rollout_log_probs.double()) * one.action_mask
            assert log_ratio == pytest.approx(difference.sum().item(), abs=1e-9)
            assert reviewed.sums.tokens[place] == one.action_mask.sum()
            assert reviewed.sums.squares[place] == pytest.approx((difference**2).sum().item(), rel=1e-9)
        # and what follows is the same
        created.with_advantages(actual)
        maker_of_kept.with_advantages(wanted)
        for name in ("advantages", "returns"):
            ours, theirs = by_sample(actual, name), by_sample(wanted, name)
            assert list(ours) == list(theirs)
            assert all(ours[n] == pytest.approx(theirs[n], rel=1e-5, abs=1e-6) for n in ours)

    @pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
    def test_group_advantages_are_those_of_the_groups_that_stay(self, estimator):
        case = Case(4, (2, 1), 3)
        samples = [generated(n) for n in range(24)]
        kept = positions([1, 2, 5], 4)
        created, actual = made_of(case, samples, origins_of(24), kept, estimator=estimator)
        actual = actual.experiences
        assert [len(batch.index) for batch in actual] == [3, 3, 3, 3]
        maker_of_kept, wanted = made_of(
            case, [samples[n] for n in kept], [origins_of(24)[n] for n in kept], estimator=estimator
        )
        created.with_advantages(actual)
        maker_of_kept.with_advantages(wanted.experiences)
        ours, theirs = by_sample(actual, "advantages"), by_sample(wanted.experiences, "advantages")
        assert sorted(ours) == sorted(theirs) == list(range(12))
        assert all(ours[n] == pytest.approx(theirs[n], rel=1e-5, abs=1e-6) for n in theirs)

    def test_where_all_stay_the_batches_are_those_of_the_models(self):
        case = Case(4, (1, 1), 3)
        experience_maker = maker(case=case)
        with without_ray() as patch:
            patch.setattr(ExperienceMaker, "_pass", by_the_models)
            passed = experience_maker.forward(with_samples([generated(n) for n in range(8)], origins_of(8)))
        assert sorted(index for batch in passed.experiences for index in batch.index) == list(range(8))
        result = experience_maker.finish(passed, range(8))
        assert all(one is other for one, other in zip(result.experiences, passed.experiences, strict=True))
        assert len(result.origins) == 8 and result.log_ratios.shape == (8,)

    def test_old_log_probs_are_those_of_the_samples_own_origin(self):
        case = Case(2, (1, 1), 4)
        samples = [generated(n) for n in range(8)]
        origins = [SampleOrigin("fresh", n in (2, 7), whole_group(n // 2), response()) for n in range(8)]
        _, actual = made_of(case, samples, origins, positions([1, 3], 2))  # samples 2, 3, 6 and 7
        (batch,) = actual.experiences
        for place, (n, on_policy) in enumerate([(2, True), (3, False), (6, False), (7, True)]):
            row = batch.index.index(place)
            (one,) = forward([copy.deepcopy(samples[n])])
            mask = one.action_mask.bool()
            wanted = one.action_log_probs if on_policy else one.rollout_log_probs
            assert torch.equal(batch.action_log_probs[row][batch.action_mask[row].bool()], wanted[mask])


# --- M2PO -------------------------------------------------------------------------------------------------------------


@given(reviews(), st.sampled_from([0.05, 0.6]))
@settings(derandomize=True, database=None)
def test_tokens_that_moved_furthest_have_no_advantage(drawn, limit):
    """Of all tokens of the batch together, in the micro-batches of any ranks."""
    case, groups, groups_kept, seed = drawn
    samples, origins = (
        [generated(n, seed) for n in range(groups * case.size)],
        origins_of(groups * case.size, case.size),
    )
    kept = positions(groups_kept, case.size)

    def from_values(experiences, *_, **__):
        for experience in experiences:
            experience.advantages, experience.returns = experience.values - 0.1, experience.values

    results = []
    for bound in (None, limit):
        experience_maker = maker(case=case, adapt__max_second_moment=bound)
        with without_ray() as patch:
            patch.setattr(experience_module, "set_advantages", from_values)
            patch.setattr(ExperienceMaker, "_pass", by_the_models)
            results.append(
                experience_maker.finish(experience_maker.forward(with_samples(copy.deepcopy(samples), origins)), kept)
            )
    plain, masked = results
    wanted, actual = (by_sample(result.experiences, "advantages") for result in results)
    counted, tokens = [], 0
    for place, n in enumerate(kept):
        (one,) = forward([copy.deepcopy(samples[n])])
        for at, ratio in enumerate((one.action_log_probs - one.rollout_log_probs)[one.action_mask.bool()].tolist()):
            tokens += 1
            if not origins[n].on_policy and ratio * wanted[place][at] > 0:
                counted.append((abs(ratio), place, at))
    counted.sort()
    while counted and sum(ratio**2 for ratio, *_ in counted) > limit * len(counted):
        _, place, at = counted.pop()
        wanted[place][at] = 0.0
    assert actual == wanted
    zeros = sum(value == 0 for values in wanted.values() for value in values)
    assert plain.masked is None and masked.masked == pytest.approx(zeros / tokens, abs=1e-12)
    assert by_sample(masked.experiences, "returns") == by_sample(plain.experiences, "returns")


# --- V-trace ----------------------------------------------------------------------------------------------------------


def by_definition(values, rewards, log_ratios, mask, gamma, lambd):
    """Espeholt et al., Eq. 1, as a sum over the tokens that follow; lists of one row, positions that are masked too.

    v_s = V_s + sum over t >= s of gamma^(t - s) (product of c_s to c_(t-1)) rho_t delta_t
    """
    length = len(values)
    values = [value if on else 0.0 for value, on in zip(values, mask, strict=True)] + [0.0]
    rewards = [reward if on else 0.0 for reward, on in zip(rewards, mask, strict=True)]
    ratios = [math.exp(ratio) if on else 1.0 for ratio, on in zip(log_ratios, mask, strict=True)]
    rho, c = [min(1, ratio) for ratio in ratios], [lambd * min(1, ratio) for ratio in ratios]
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
    targets = [
        values[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * delta[t] for t in range(s, length))
        for s in range(length)
    ] + [0.0]
    return [delta[s] + gamma * lambd * (targets[s + 1] - values[s + 1]) for s in range(length)], targets[:-1]


VTRACE = {"estimator": "gae", "adapt__returns": "vtrace"}


class TestVtrace:
    @given(
        drawn=reviews(),
        gamma=st.sampled_from([1.0, 0.9]),
        lambd=st.sampled_from([1.0, 0.95]),
        coefficient=st.sampled_from([0.0, 0.2]),
        ratio=st.sampled_from(["behaviour", "decoupled"]),
        critic_lambd=st.sampled_from([None, 1.0, 0.9]),
    )
    @settings(derandomize=True, database=None)
    def test_is_the_definition_on_the_rows_that_stayed(self, drawn, gamma, lambd, coefficient, ratio, critic_lambd):
        case, groups, groups_kept, seed = drawn
        size = case.size
        samples = [generated(n, seed) for n in range(groups * size)]
        kept = positions(groups_kept, size)
        changed = {"adapt__ratio": ratio, "adapt__critic_lambd": critic_lambd}
        changed |= {"algo__advantage__gamma": gamma, "algo__advantage__lambd": lambd}
        origins = origins_of(len(samples))
        created, actual = made_of(case, samples, origins, kept, kl=coefficient, **VTRACE, **changed)
        actual = actual.experiences
        created.with_advantages(actual)
        advantages, targets = {}, {}
        for place, n in enumerate(kept):
            (one,) = forward([copy.deepcopy(samples[n])])
            mask = one.action_mask[0].tolist()
            last = max(position for position, on in enumerate(mask) if on)
            rewards = [-coefficient * kl for kl in one.kl[0].tolist()]
            rewards[last] += one.rewards.item()
            # today's policy against the one that generated the sample, also where old log-probs are replaced
            log_ratios = (one.action_log_probs - one.rollout_log_probs)[0].tolist()
            if origins[n].on_policy:  # it is the same one
                log_ratios = [0.0] * len(mask)
            text = one.values[0].tolist(), rewards, log_ratios, mask, gamma
            (a, _), (_, v) = (by_definition(*text, x) for x in (lambd, lambd if critic_lambd is None else critic_lambd))
            advantages[place] = [value for value, on in zip(a, mask, strict=True) if on]
            targets[place] = [value for value, on in zip(v, mask, strict=True) if on]
        tokens = np.concatenate([advantages[place] for place in advantages])
        deviation = max(tokens.std(), 1e-4)  # OpenRLHF whitens over the whole batch
        whitened, returns = by_sample(actual, "advantages"), by_sample(actual, "returns")
        assert sorted(whitened) == sorted(returns) == sorted(advantages)
        for place in advantages:
            assert returns[place] == pytest.approx(targets[place], rel=1e-4, abs=1e-5)
            wanted = [(value - tokens.mean()) / deviation for value in advantages[place]]
            assert whitened[place] == pytest.approx(wanted, rel=1e-3, abs=1e-3)

    @pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.97, 1.0), (0.97, 0.9)])
    def test_on_policy_is_openrlhfs(self, gamma, lambd):
        rewards, parts = [1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0], [[6, 1], [0, 3, 7], [2, 4, 5]]
        changed = {"kl": 0.1, "algo__advantage__gamma": gamma, "algo__advantage__lambd": lambd}
        experience_maker = maker(**VTRACE, **changed)
        experience_maker.log_ratios = [np.zeros_like(part) for part in off_policy(parts)]
        ours = experience_maker.with_advantages(split(rewards, parts, kl=1.0))
        theirs = plain_maker(experience_maker).compute_advantages_and_returns(split(rewards, parts, kl=1.0))
        for name in ("advantages", "returns"):
            actual, wanted = by_sample(ours, name), by_sample(theirs, name)
            assert list(actual) == list(wanted)
            for sample in wanted:
                assert actual[sample] == pytest.approx(wanted[sample], rel=1e-5, abs=1e-5)
        assert all(e.advantages.dtype == e.returns.dtype == torch.float32 for e in ours)

    def test_off_policy_it_is_not(self):
        rewards, parts = [1.0, 0.0, 0.5, 1.0], [[0, 1], [2, 3]]
        experience_maker = maker(**VTRACE)
        experience_maker.log_ratios = off_policy(parts)
        ours = by_sample(experience_maker.with_advantages(split(rewards, parts)), "returns")
        theirs = by_sample(
            plain_maker(experience_maker).compute_advantages_and_returns(split(rewards, parts)), "returns"
        )
        assert all(ours[sample] != pytest.approx(theirs[sample], abs=1e-3) for sample in theirs)

    def test_gae_does_not_look_at_the_ratios(self):
        rewards, parts = [1.0, 0.0, 0.5, 1.0], [[3, 1], [0, 2]]
        result = []
        for seed in (1, 2):
            experience_maker = maker("gae", kl=0.1, algo__advantage__lambd=0.9)
            experience_maker.log_ratios = off_policy(parts, seed)
            result.append(by_sample(experience_maker.with_advantages(split(rewards, parts, kl=1.0)), "advantages"))
        assert result[0] == result[1]

    def test_another_batch_has_other_ratios(self):
        # nothing of the step before is left
        case = Case(2, (1, 1), 3)
        experience_maker = maker(case=case, **VTRACE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExperienceMaker, "_pass", lambda self, dealt, known, **_: forward(dealt.batches))
            for seed, count in ((1, 8), (2, 4)):
                samples = [generated(n, seed) for n in range(count)]
                passed = experience_maker.forward(with_samples(copy.deepcopy(samples), origins_of(count)))
                actual = experience_maker.finish(passed, range(count))
        maker_of_kept, wanted = made_of(case, samples, origins_of(4), **VTRACE)
        maker_of_kept.with_advantages(wanted.experiences)
        assert by_sample(actual.experiences, "returns") == by_sample(wanted.experiences, "returns")


# --- what is noted of the loss ----------------------------------------------------------------------------------------


def test_a_stored_response_is_not_of_todays_weights(make_group):
    """Also in a group of today's weights, as of a method that exchanges responses."""
    extras = {"mm_train_inputs": None, "score": None, "truncated": False, "info": {}}
    stored = make_group(1, size=2, prompt="p", step=1, weights_version=1, extras=extras)
    group = make_group(1, size=2, prompt="p", step=5, weights_version=5, extras=extras)
    group = group.exchange(0, stored.standalone(stored.responses[0]))
    assert [origin.on_policy for origin in experience_module.origins_of(Batch(fresh=[group]), 5)] == [False, True]


class TestTokensOfTheLoss:
    """By source, against OpenRLHF's own loss on that source's samples."""

    def experience(
        self, *, critic: bool = True, kept=range(12), origins=None, **changed
    ) -> tuple[BatchExperience, list]:
        """Three groups of four, of all sources within each group, made into experience."""
        case = Case(4, (1, 1), 5)
        samples = [generated(n) for n in range(12)]
        experience_maker = maker("gae" if critic else "group_norm", case=case, kl=0.1, **changed)

        def models(self, dealt, known, **_):
            for batch in forward(dealt.batches):
                batch.values = batch.values if critic else None
                batch.rollout_log_probs = batch.rollout_log_probs / 4  # near enough that not all is clipped
            return dealt.batches

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExperienceMaker, "_pass", models)
            experience = experience_maker.finish(
                experience_maker.forward(with_samples(samples, origins or origins_of(12))), kept
            )
            return experience, experience.experiences

    def current(self, experience: Experience) -> torch.Tensor:
        """The actor's log-probs, as `forward` makes them."""
        (fresh,) = forward([copy.deepcopy(experience)])
        return fresh.action_log_probs

    @pytest.mark.parametrize("critic", [True, False])
    @pytest.mark.parametrize(
        ("changed", "loss"),
        [
            ({}, {}),
            ({"adapt__ratio": "decoupled"}, {}),
            ({"algo__advantage__is_correction_level": "token"}, {"is_correction_level": "token"}),
            ({"actor__policy_loss_type": "gspo"}, {"policy_loss_type": "gspo"}),
            (
                {"actor__policy_loss_type": "gspo", "algo__advantage__is_correction_level": "token"},
                {"policy_loss_type": "gspo", "is_correction_level": "token"},
            ),
        ],
        ids=["ppo", "decoupled", "corrected", "gspo", "gspo corrected"],
    )
    def test_clip_is_openrlhfs(self, critic, changed, loss):
        created, experiences = self.experience(critic=critic, **changed)
        metrics = first_update(created.tokens, Clip(0.2, 0.2))
        shares = []
        for source in ("fresh", "reevaluated", "replayed"):
            clipped = count = 0.0
            for experience in experiences:
                mask = experience.action_mask.clone()
                for row, index in enumerate(experience.index):
                    mask[row] *= int(created.origins[index].source == source)
                if not mask.any():
                    continue
                _, share, *_ = PolicyLoss(0.2, 0.2, **loss)(
                    self.current(experience),
                    experience.action_log_probs,
                    experience.advantages,
                    mask,
                    rollout_log_probs=experience.rollout_log_probs,
                )
                clipped, count = clipped + float(share * mask.sum()), count + float(mask.sum())
            assert created.tokens[source].advantages.shape == (count,)
            assert metrics[f"clip/{source}"] == pytest.approx(clipped / count, abs=1e-6)
            shares.append(clipped / count)
        assert (max(shares) == 0) == ("adapt__ratio" in changed)  # decoupled: old log-probs are today's

    def test_advantages_and_value_errors_are_the_losss(self):
        created, experiences = self.experience()
        for source in ("fresh", "reevaluated", "replayed"):
            advantages, errors = [], []
            for experience in experiences:
                for row, index in enumerate(experience.index):
                    for place in range(experience.action_mask.shape[1]):
                        if created.origins[index].source == source and experience.action_mask[row, place]:
                            advantages.append(float(experience.advantages[row, place]))
                            errors.append(float(experience.values[row, place] - experience.returns[row, place]))
            assert created.tokens[source].advantages.tolist() == advantages
            assert created.tokens[source].value_errors.tolist() == pytest.approx(errors, abs=1e-6)

    def test_without_a_critic_there_are_no_value_errors(self):
        created, _ = self.experience(critic=False)
        assert all(tokens.value_errors is None for tokens in created.tokens.values())

    def test_samples_that_left_the_batch_are_not_in_it(self):
        created, experiences = self.experience(kept=[4, 5, 6, 7])
        assert sum(len(tokens.advantages) for tokens in created.tokens.values()) == sum(
            int(experience.action_mask.sum()) for experience in experiences
        )
        assert len(created.origins) == 4

    def test_a_source_without_samples_has_no_numbers(self):
        created, _ = self.experience(
            origins=[SampleOrigin("fresh", True, whole_group(n // 4), response()) for n in range(12)]
        )
        assert {name.split("/")[1][:5] for name in first_update(created.tokens, Clip(0.2, 0.2))} == {"fresh"}

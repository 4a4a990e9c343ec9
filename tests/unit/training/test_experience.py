"""Importance ratios, KL targets and advantages of a batch of three sources. Ray is not started."""

import copy
import math
import statistics
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction as F
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_stack import SOURCES, World
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.models.loss import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray import launcher
from reference_rules import by_definition
from test_dealing import everything
from test_dealing import sample as generated

from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS
from bapo_openrlhf.adapt.monitor import Clip, first_update
from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.training.trainer import experience as experience_module
from bapo_openrlhf.training.trainer.advantages import set_advantages
from bapo_openrlhf.training.trainer.dealing import DealtBatch
from bapo_openrlhf.training.trainer.experience import ExperienceMaker, ReferenceLogProbs, SampleOrigin, old_log_probs

pytestmark = pytest.mark.usefixtures("values_for_refs")

EPS = 1e-6
ARGUMENTS = World.arguments(Path("unused"), {})
# One row a sample: a whole turn, padding, two turns, one token.
MASKS = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0]], dtype=torch.long)


def group_of(name: str, ranks: int, calls: list | None = None) -> launcher.RayActorGroup:
    """OpenRLHF's group of a model's processes, which answer at once as `answer` says, and note their calls."""
    calls = [] if calls is None else calls

    def execute(method: str, chunk: dict, start: int, end: int) -> list[torch.Tensor]:
        assert method == "forward" and (start, end) == (0, len(chunk["sequences"]))
        calls.append((name, sorted(chunk)))
        return [answer(sequences, name) for sequences in chunk["sequences"]]

    process = SimpleNamespace(
        execute_batch=SimpleNamespace(remote=execute),
        empty_cache=SimpleNamespace(remote=lambda: calls.append((name, "empty_cache"))),
    )
    group = object.__new__(launcher.RayActorGroup)
    group._actor_handlers, group.duplicate_actors = [process] * ranks, 1
    return group


def whole_group(number: int) -> SimpleNamespace:
    """A group with all responses that it was generated with, as far as the experience maker looks at it."""
    return SimpleNamespace(uid=number, relative_to="kept", reward_range=UNIT)


def maker(
    estimator: str = "group_norm", *, size: int = 4, ranks: tuple[int, int] = (1, 1), micro: int = 3, kl: float = 0.0,
    **changed,
) -> ExperienceMaker:  # fmt: skip
    """An experience maker of these arguments, whose models answer at once, without Ray.

    A group has `size` responses, actor and critic have `ranks`, and a forward pass has `micro` samples.
    """
    args = copy.deepcopy(ARGUMENTS)
    changed |= {"algo__advantage__estimator": estimator}
    changed |= {"rollout__n_samples_per_prompt": size, "rollout__micro_batch_size": micro}
    for name, value in changed.items():
        *parents, key = name.split("__")
        setattr(reduce(getattr, parents, args), key, value)
    models = group_of("action_log_probs", ranks[0]), group_of("values", ranks[1]), None
    return ExperienceMaker(args, *models, kl_ctl=SimpleNamespace(value=kl), pad=9)


def with_advantages(experience_maker: ExperienceMaker, samples, groups=None, log_ratios=()) -> list[Experience]:
    """The samples with advantages. `groups` has the group of each; None: groups of G responses in a row."""
    args, coefficient = experience_maker.args, experience_maker.kl_ctl.value
    groups = groups or [whole_group(n // args.rollout.n_samples_per_prompt) for n in range(len(samples))]
    options = {"kl_coefficient": coefficient, "critic_lambd": args.adapt.critic_lambd, "log_ratios": log_ratios}
    set_advantages(samples, groups, args, **options)
    return samples


def plain_maker(experience_maker: ExperienceMaker, *models) -> RemoteExperienceMaker:
    """OpenRLHF's maker with the same arguments."""
    tokenizer = SimpleNamespace(pad_token_id=experience_maker.pad)
    parts = experience_maker.kl_ctl, SimpleNamespace(args=experience_maker.args), tokenizer
    return RemoteExperienceMaker(*(models or [None] * 4), *parts)


def made_up(rewards: list[float], *, seed: int = 0, kl: float = 0.0) -> list[Experience]:
    """A sample for each reward, with its own mask and per-token numbers. OpenRLHF reads their positions."""
    rng = torch.Generator().manual_seed(seed)
    kls = kl * torch.rand((len(rewards), MASKS.shape[1]), generator=rng)
    values = torch.randn((len(rewards), MASKS.shape[1]), generator=rng)
    masks = MASKS[torch.arange(len(rewards)) % len(MASKS)]
    parts = zip(rewards, masks.split(1), (kls * masks).split(1), values.split(1), strict=True)
    return [
        Experience(index=[n], rewards=torch.tensor([reward]), action_mask=mask, kl=kl, values=value, info={})
        for n, (reward, mask, kl, value) in enumerate(parts)
    ]


def off_policy(count: int, seed: int = 7) -> list[np.ndarray]:
    """A log-ratio for each token of so many samples of `made_up`: far from today's policy."""
    return list(np.random.default_rng(seed).normal(0.0, 1.0, (count, 1, MASKS.shape[1])))


def tokens_of(sample: Experience, name: str) -> torch.Tensor:
    """A field's numbers at the generated tokens."""
    return getattr(sample, name)[sample.action_mask.bool()]


def by_sample(samples: list[Experience], name: str) -> list[list[float]]:
    """A field's numbers at each sample's generated tokens."""
    return [tokens_of(sample, name).tolist() for sample in samples]


def advantages_of(*about) -> list[list[float]]:
    """The advantages that `with_advantages` gives each sample's generated tokens."""
    return by_sample(with_advantages(*about), "advantages")


def test_old_log_probs_have_the_type_of_the_actors():
    actors, stored = torch.tensor([[-3.0, -4.0]], dtype=torch.bfloat16), torch.tensor([[-0.5, -0.25]])
    result = old_log_probs(actors, stored, on_policy=False)
    assert result.dtype == torch.bfloat16 and result.tolist() == stored.tolist()


class TestGroupAdvantages:
    def test_rewards_that_cancel_have_no_advantage_at_the_size_of_their_range(self):
        for high, signal in ((1, False), (F(1, 10**9), True)):
            group = whole_group(0)
            group.reward_range = (F(0), F(high))
            advantages = advantages_of(maker(size=2, adapt__eps=1e-30), made_up([0.0, 1e-9]), [group, group])
            assert advantages[1] == pytest.approx([float(signal)] * len(advantages[1]))

    def test_length_penalties_come_first(self):
        # truncated responses get -1: the group is 1, 1, -1, -1 and not 1, 1, 1, 1
        samples = [replace(one, truncated=torch.tensor([n > 1])) for n, one in enumerate(made_up([1.0] * 4))]
        advantages = advantages_of(maker(reward__stop_properly_penalty_coef=-1.0), samples)
        assert advantages[0] == pytest.approx([1.0] * 5, rel=1e-5)
        assert advantages[2] == pytest.approx([-1.0] * 4, rel=1e-5)

    @pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
    def test_other_group_estimators_are_openrlhfs(self, estimator):
        """Eq. 2 is, too, up to the sample standard deviation by which OpenRLHF divides."""
        rewards = [0.0, 1.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0]
        ours, plain = advantages_of(maker(estimator), made_up(rewards)), plain_maker(maker(estimator))
        theirs = by_sample(plain.compute_advantages_and_returns(made_up(rewards)), "advantages")
        factor, rel = (math.sqrt(4 / 3), 1e-4) if estimator == "group_norm" else (1, 1e-5)
        for sample in range(8):
            wanted = [factor * value for value in theirs[sample]]
            assert ours[sample] == pytest.approx(wanted, rel=rel, abs=1e-7)


@st.composite
def groups_of_any_size(draw) -> tuple[list[SimpleNamespace], list[float]]:
    """The group of each sample and its reward. Groups hold some of the responses that they were generated with."""
    reward, groups, rewards = st.sampled_from([0.0, 1.0, 0.25, -2.0]), [], []
    for uid in range(draw(st.integers(1, 4))):
        generated = draw(st.lists(reward, min_size=2, max_size=6))
        kept = sorted(draw(st.sets(st.sampled_from(range(len(generated))), min_size=1)))
        known = {"generated": generated, "relative_to": draw(st.sampled_from(["generated", "kept"]))}
        groups += [SimpleNamespace(uid=10 - uid, size=len(kept), reward_range=UNIT, **known)] * len(kept)
        rewards += [generated[position] for position in kept]
    return groups, rewards


class TestGroupsOfAnySize:
    @given(
        drawn=groups_of_any_size(), estimator=st.sampled_from(["group_norm", "rloo", "dr_grpo"]),
        eps=st.sampled_from([EPS, 0.75]), coefficient=st.sampled_from([0.0, 0.3]),
    )  # fmt: skip
    @settings(derandomize=True, database=None)
    def test_advantages_one_by_one_with_kl_in_the_reward(self, drawn, estimator, eps, coefficient):
        """A response by itself has its advantage still, unless it is compared only with itself."""
        groups, rewards = drawn
        given = made_up(rewards, kl=0.8)
        kls = by_sample(given, "kl")
        changed = {"adapt__eps": eps, "algo__advantage__gamma": 0.5}  # a critic's gamma, which is not read
        samples = with_advantages(maker(estimator, kl=coefficient, **changed), given, groups)
        actual = by_sample(samples, "advantages")
        assert [one.rewards.item() for one in samples] == rewards  # the record reads them
        assert by_sample(samples, "returns") == actual and all(one.kl is None for one in samples)
        for sample, (group, group_rewards) in enumerate(zip(groups, rewards, strict=True)):
            of_group = [reward for other, reward in zip(groups, rewards, strict=True) if other is group]
            others = list(group.generated if group.relative_to == "generated" else of_group)
            mean, deviation = statistics.fmean(others), statistics.pstdev(others)
            others.remove(group_rewards)
            related = {
                "group_norm": (group_rewards - mean) / math.sqrt(deviation**2 + eps),
                "rloo": group_rewards - statistics.fmean(others) if others else 0.0,
                "dr_grpo": group_rewards - mean,
            }[estimator]
            wanted = related - coefficient * np.cumsum(kls[sample][::-1])[::-1]
            assert actual[sample] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert samples[sample].info["return"].item() == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
            assert samples[sample].info["group_reward_std"].item() == pytest.approx(deviation, abs=1e-6)

    @given(
        drawn=groups_of_any_size(), returns=st.sampled_from(["gae", "vtrace"]), no_std_norm=st.booleans(),
        discounts=st.sampled_from([(1.0, 1.0), (0.97, 1.0), (1.0, 0.9), (0.97, 0.9)]),
    )  # fmt: skip
    @settings(derandomize=True, database=None)
    def test_a_critic_sees_no_groups(self, drawn, returns, discounts, no_std_norm):
        """GAE is OpenRLHF's own of single responses, to the last bit. With today's policy, V-trace is the same."""
        groups, rewards = drawn
        changed = {"kl": 0.1, "adapt__returns": returns, "algo__advantage__no_std_norm": no_std_norm}
        changed |= {"algo__advantage__gamma": discounts[0], "algo__advantage__lambd": discounts[1]}
        ratios = [part * (returns == "gae") for part in off_policy(len(rewards))]  # GAE does not look at them
        ours = with_advantages(maker("gae", **changed), made_up(rewards, kl=0.5), groups, ratios)
        plain = plain_maker(maker("gae", size=1, **changed))
        theirs = plain.compute_advantages_and_returns(made_up(rewards, kl=0.5))
        for name in ("advantages", "returns"):
            actual, wanted = by_sample(ours, name), by_sample(theirs, name)
            if returns == "gae":
                assert actual == wanted
            for one, other in zip(actual, wanted, strict=True):
                assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
        assert all(e.advantages.dtype == e.returns.dtype == torch.float32 for e in ours)

    def test_the_clip_range_is_of_what_the_estimator_makes(self):
        actual = advantages_of(maker("dr_grpo", reward__clip_range=(-0.125, 0.5)), made_up([1.0, 0.0, 0.0, 0.0]))
        assert [set(actual[sample]) for sample in range(4)] == [{0.5}, *[{-0.125}] * 3]

    @pytest.mark.parametrize(
        ("estimator", "relative_to", "fails"),
        [("group_norm", "generated", True), ("gae", "generated", False), ("group_norm", "kept", False)],
    )
    def test_length_penalties_of_responses_that_are_gone_are_not_known(self, estimator, relative_to, fails):
        experience = replace(made_up([1.0])[0], truncated=torch.tensor([True]))
        group = SimpleNamespace(uid=7, size=1, generated=[1.0, 0.0], relative_to=relative_to, reward_range=UNIT)
        with pytest.raises(ValueError, match="group 7 holds only some") if fails else nullcontext():
            with_advantages(maker(estimator, reward__stop_properly_penalty_coef=-1.0), [experience], [group])
        assert experience.rewards.tolist() == [-1.0]


def test_equal_advantages_stay_finite():
    assert not any(map(any, advantages_of(maker("reinforce_baseline"), made_up([1.0] * 4))))


# --- make_experience --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "loss"])
@pytest.mark.parametrize(("reference", "critic"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("colocated", [None, "colocate_all", "colocate_actor_ref", "colocate_critic_reward"])
def test_a_pass_is_openrlhfs(kl, reference, critic, colocated):
    """Its `make_experience` of the same samples has the same numbers, and calls the same models in the same order."""
    changed = {f"train__{colocated}": True} if colocated else {}
    changed |= {"algo__kl__use_loss": True} if kl == "loss" else {"algo__kl__estimator": kl}
    experience_maker, samples = maker(**changed), [generated(n) for n in range(5)]
    there = {"action_log_probs": True, "values": critic, "base_action_log_probs": reference}
    ours, theirs = calls = [], []
    models, others = ([group_of(name, 1, noted) if there[name] else None for name in there] for noted in calls)
    experience_maker.actor, experience_maker.critic, experience_maker.reference = models
    plain = plain_maker(experience_maker, *others[:2], None, others[2])
    wanted = plain.make_experience(copy.deepcopy(samples))
    known = ReferenceLogProbs("r", [SimpleNamespace(extras={}) for _ in samples])
    experience_maker._pass(samples, known, experience_maker.reference, policies=True)
    assert ours == theirs
    for one, other in zip(samples, wanted, strict=True):
        mask = one.action_mask.bool()
        for name in ("action_log_probs", "base_action_log_probs", "values", "kl"):
            mine, openrlhfs = getattr(one, name), getattr(other, name)
            assert (mine is None) is (openrlhfs is None), name
            assert mine is None or torch.equal(mine[mask], openrlhfs[mask]), name
        assert list(one.info) == list(other.info)
        for name in ("kl", "logprobs_diff"):
            assert torch.equal(one.info[name], other.info[name]), name


# --- samples and models -----------------------------------------------------------------------------------------------

BY_MODELS = ("action_log_probs", "base_action_log_probs", "values", "kl")  # of shape (B, A)


def answer(sequences: torch.Tensor, name: str) -> torch.Tensor:
    """A model's numbers, (B, A): they depend on a sample's tokens only; there are some for padding, too."""
    tokens = sequences[:, 1:].double()
    return -(((tokens * 7 + torch.arange(tokens.shape[1]) * 3 + BY_MODELS.index(name)) % 11) / 8).float()


def passed(one: Experience) -> Experience:
    """The sample as OpenRLHF's models leave it if it passes them by itself."""
    for name in BY_MODELS:
        setattr(one, name, answer(one.sequences, name))
    one.info["kl"] = (one.kl * one.action_mask).sum(-1)
    return one


def by_the_models(self: ExperienceMaker, samples: list[Experience], *_: object, **__: object) -> None:
    """The same, and actor and critic are asked."""
    dealt = DealtBatch(list(map(passed, samples)), self.args, self.pad)
    for name, model in {"action_log_probs": self.actor, "values": self.critic}.items():
        for place, row in dealt.ask(model)().items():
            setattr(samples[place], name, row.unsqueeze(0))


def origins_of(count: int, size: int = 4) -> list[SampleOrigin]:
    """Of all sources within each group."""
    return [
        SampleOrigin(SOURCES[n % 3], n % 2 == 0, whole_group(n // size), SimpleNamespace(extras={}))
        for n in range(count)
    ]


@st.composite
def reviews(draw):
    """Arguments of `made_of`: samples, their origins, and the positions of those that stay (any groups); and others."""
    ranks, size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3))), draw(st.integers(1, 4))
    groups, seed = draw(st.integers(1, 12)), draw(st.integers(0, 1000))
    stays = sorted(draw(st.permutations(range(groups)))[: draw(st.integers(1, groups))])
    samples = [generated(1000 * seed + n) for n in range(groups * size)]
    kept = [group * size + row for group in stays for row in range(size)]
    others = {"size": size, "ranks": ranks, "micro": draw(st.integers(1, 5))}
    return samples, origins_of(len(samples), size), kept, others


def made_of(samples: list[Experience], origins: list[SampleOrigin], kept=None, *, advantages=set_advantages, **changed):
    """The experience of the samples at the positions `kept`; None: of all of them.

    `by_the_models` takes the place of the models, and `advantages` that of `set_advantages`.
    """
    experience_maker = maker(**changed)
    responses = [
        SimpleNamespace(**vars(origin), sample=lambda sample=sample: sample)
        for origin, sample in zip(origins, copy.deepcopy(samples), strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExperienceMaker, "_pass", by_the_models)
        patch.setattr(experience_module, "set_advantages", advantages)
        made = experience_maker.forward(responses)
        return experience_maker.finish(made, range(len(samples)) if kept is None else kept)


def from_values(samples: list[Experience], *_: object, **__: object) -> None:
    """In the place of `set_advantages`, after which the KL would be gone."""
    for one in samples:
        one.advantages, one.returns = one.values - 0.1, one.values


def near(count: int) -> list[Experience]:
    """Samples of a policy so near that OpenRLHF limits no estimate of its KL, and clips not every token."""
    return [replace(one, rollout_log_probs=one.rollout_log_probs / 4) for one in map(generated, range(count))]


@pytest.mark.parametrize("ratio", ["behaviour", "decoupled"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "loss"])
def test_kl_to_the_behaviour_policy(kl, ratio):
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}.get(kl)
    changed = {"algo__kl__estimator": kl} if formula else {"algo__kl__use_loss": True}
    changed |= {"adapt__kl_target": "behaviour", "adapt__ratio": ratio}
    batch = made_of(near(8), origins_of(8), advantages=from_values, **changed)
    for one, row in zip(map(passed, near(8)), batch.samples, strict=True):
        behaviour, base = tokens_of(one, "rollout_log_probs"), tokens_of(row, "base_action_log_probs")
        if not formula:  # in the loss
            assert torch.equal(base, behaviour) and torch.equal(tokens_of(row, "kl"), tokens_of(one, "kl"))
            continue
        # against today's log-probs, also where they are replaced as the old ones
        wanted = list(map(formula, (tokens_of(one, "action_log_probs") - behaviour).tolist()))
        assert tokens_of(row, "kl").tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert not row.kl[~row.action_mask.bool()].any()
        assert row.info["kl"].tolist() == pytest.approx([sum(wanted) / len(wanted)], rel=1e-5, abs=1e-6)
        assert torch.equal(base, tokens_of(one, "base_action_log_probs"))


@given(drawn=reviews(), estimator=st.sampled_from(["gae", *GROUP_ESTIMATORS]))
@settings(derandomize=True, database=None)
def test_a_review_is_as_if_the_others_had_never_been_in_the_batch(drawn, estimator):
    samples, origins, kept, others = drawn
    others |= {"estimator": estimator, "adapt__returns": "vtrace", "kl": 0.1}
    reviewed = made_of(samples, origins, kept, **others)
    without = made_of([samples[n] for n in kept], [origins[n] for n in kept], **others)
    assert list(map(everything, reviewed.samples)) == list(map(everything, without.samples))
    assert all(one.response is origins[n].response for one, n in zip(reviewed.origins, kept, strict=True))
    # they are the log ratios of the samples, in order
    for place, n in enumerate(kept):
        one = passed(samples[n])
        difference = (one.action_log_probs.double() - one.rollout_log_probs.double()) * one.action_mask
        assert reviewed.log_ratios[place] == pytest.approx(difference.sum().item(), abs=1e-9)
        assert reviewed.sums.tokens[place] == one.action_mask.sum()
        assert reviewed.sums.squares[place] == pytest.approx((difference**2).sum().item(), rel=1e-9)


@given(reviews(), st.sampled_from([0.05, 0.6]))
@settings(derandomize=True, database=None)
def test_tokens_that_moved_furthest_have_no_advantage(drawn, limit):
    samples, origins, kept, others = drawn
    plain, masked = (
        made_of(samples, origins, kept, advantages=from_values, adapt__max_second_moment=bound, **others)
        for bound in (None, limit)
    )
    wanted, actual = (by_sample(result.samples, "advantages") for result in (plain, masked))
    counted = []
    for place, n in enumerate(kept):
        one = passed(samples[n])
        for at, ratio in enumerate((one.action_log_probs - one.rollout_log_probs)[one.action_mask.bool()].tolist()):
            if not origins[n].on_policy and ratio * wanted[place][at] > 0:
                counted.append((abs(ratio), place, at))
    counted.sort()
    while counted and sum(ratio**2 for ratio, *_ in counted) > limit * len(counted):
        _, place, at = counted.pop()
        wanted[place][at] = 0.0
    assert actual == wanted
    share = np.mean([value == 0 for values in wanted for value in values])
    assert plain.masked is None and masked.masked == pytest.approx(share, abs=1e-12)
    assert by_sample(masked.samples, "returns") == by_sample(plain.samples, "returns")


@given(
    drawn=reviews(), returns=st.sampled_from(["gae", "vtrace"]), gamma=st.sampled_from([1.0, 0.9, 0.5]),
    lambd=st.sampled_from([1.0, 0.95, 0.0]), critic_lambd=st.sampled_from([None, 1.0, 0.9, 0.3]),
    coefficient=st.sampled_from([0.0, 0.2]), ratio=st.sampled_from(["behaviour", "decoupled"]),
)  # fmt: skip
@settings(derandomize=True, database=None, max_examples=3 * settings.default.max_examples)
def test_returns_are_the_definition_on_the_rows_that_stayed(
    drawn, returns, gamma, lambd, critic_lambd, coefficient, ratio
):
    samples, origins, kept, others = drawn
    changed = {"adapt__ratio": ratio, "adapt__critic_lambd": critic_lambd, "adapt__returns": returns}
    changed |= {"algo__advantage__gamma": gamma, "algo__advantage__lambd": lambd}
    actual = made_of(samples, origins, kept, estimator="gae", kl=coefficient, **changed, **others).samples
    advantages, targets = [], []
    for n in kept:
        one = passed(samples[n])
        mask = one.action_mask[0].bool().numpy()
        rewards = -coefficient * one.kl[0].numpy()
        rewards[mask.nonzero()[0][-1]] += one.rewards.item()
        # today's policy against the one that generated the sample, also where old log-probs are replaced
        log_ratios = (one.action_log_probs - one.rollout_log_probs)[0].numpy()
        if origins[n].on_policy or returns == "gae":  # it is the same one, or GAE takes it for that
            log_ratios = np.zeros(len(mask))
        text = one.values[0].tolist(), rewards, log_ratios, mask, gamma
        (a, _), (_, v) = (by_definition(*text, x) for x in (lambd, lambd if critic_lambd is None else critic_lambd))
        advantages.append(np.array(a)[mask])
        targets.append(np.array(v)[mask])
    tokens = np.concatenate(advantages)
    deviation = max(tokens.std(), 1e-4)  # OpenRLHF whitens over the whole batch
    for place, one in enumerate(actual):
        assert tokens_of(one, "returns").tolist() == pytest.approx(targets[place], rel=1e-4, abs=1e-5)
        wanted = (advantages[place] - tokens.mean()) / deviation
        assert tokens_of(one, "advantages").tolist() == pytest.approx(wanted, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("kept", [range(12), [4, 5, 6, 7]])
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
def test_what_is_noted_of_each_source_is_openrlhfs(changed, loss, kept):
    """Against OpenRLHF's own loss on that source's samples. Each group has samples of all sources."""
    created = made_of(near(12), origins_of(12), kept, estimator="gae", micro=5, kl=0.1, **changed)
    metrics, shares = first_update(created.tokens, Clip(0.2, 0.2)), []
    for source in SOURCES:
        clipped = count = 0.0
        of_source = [one for one, o in zip(created.samples, created.origins, strict=True) if o.source == source]
        for one in of_source:
            current = answer(one.sequences, "action_log_probs")
            about = current, one.action_log_probs, one.advantages, one.action_mask
            _, share, *_ = PolicyLoss(0.2, 0.2, **loss)(*about, rollout_log_probs=one.rollout_log_probs)
            clipped, count = clipped + float(share * one.action_mask.sum()), count + float(one.action_mask.sum())
        assert metrics[f"clip/{source}"] == pytest.approx(clipped / count, abs=1e-6)
        shares.append(clipped / count)
        advantages, values, returns = (
            torch.cat([tokens_of(one, name) for one in of_source]) for name in ("advantages", "values", "returns")
        )
        assert created.tokens[source].advantages.tolist() == advantages.tolist()
        assert created.tokens[source].value_errors.tolist() == pytest.approx((values - returns).tolist(), abs=1e-6)
    if len(kept) == 12:  # where it is decoupled, old log-probs are today's
        assert (max(shares) == 0) == ("adapt__ratio" in changed)

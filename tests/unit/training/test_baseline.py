"""The baseline of the actor's advantages, and its lambda by length, against sums that are written out."""

import math

import numpy as np
import pytest
import torch
from fake_stack import by_position
from hypothesis import given
from hypothesis import strategies as st
from reference_rules import by_definition
from test_experience import MASKS, by_sample, made_up, maker, off_policy, whole_group

from bapo_openrlhf.training.trainer.advantages import set_advantages

SIZE = 4


def choice_of(rewards, fresh, knows, seed, kl, returns, clip, **words):
    """Experience before and after, the choice, and what follows each token (Monte Carlo), by sample."""
    words = {"adapt__critic_lambd": 0.7, "adapt__returns": returns, "reward__clip_range": clip} | words
    experience_maker = maker("gae", kl=kl, **words)
    samples = made_up(rewards, seed=seed, kl=0.3)
    for one in samples:  # a critic that knows something: it adds its noise, too
        one.values = knows * one.rewards.unsqueeze(-1) + 0.3 * one.values
    of_tokens = [one.kl[one.action_mask.bool()] for one in samples]
    follows = [
        [reward - kl * float(kls[place:].sum()) for place in range(len(kls))]
        for reward, kls in zip(np.clip(rewards, *clip), of_tokens, strict=True)
    ]
    groups = [whole_group(sample // SIZE) for sample in range(len(rewards))]
    options = {"log_ratios": off_policy(len(rewards), seed) if returns == "vtrace" else (), "kl_coefficient": kl}
    options |= {"critic_lambd": 0.7, "fresh": None if fresh is None else np.repeat(fresh, SIZE)}
    return samples, set_advantages(samples, groups, experience_maker.args, **options), follows


def whitened(rows):
    every = np.concatenate([*map(np.array, rows)])
    return [(np.array(row) - every.mean()) / math.sqrt(max(every.var(), 1e-8)) for row in rows]


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=4 * SIZE, max_size=4 * SIZE),
    fresh=st.lists(st.booleans(), min_size=4, max_size=4), knows=st.floats(0, 1.5), seed=st.integers(0, 99),
    kl=st.sampled_from([0.0, 0.5]), returns=st.sampled_from(["gae", "vtrace"]),
    clip=st.sampled_from([(-10.0, 10.0), (0.2, 0.6)]), kind=st.sampled_from(["critic", "batch", "group"]),
)  # fmt: skip
def test_which_baseline_and_what_it_makes(kind, **given):
    rewards, fresh = np.clip(given["rewards"], *given["clip"]), given["fresh"]
    experiences, chosen, follows = choice_of(**given, adapt__critic_baseline=kind)
    values = by_sample(experiences, "values")
    groups = rewards.reshape(-1, SIZE)
    others = (groups.sum(1, keepdims=True) - groups).ravel() / (SIZE - 1)  # the mean of the others of the group
    others = others if kind == "group" else np.full(len(rewards), rewards.mean())
    of_fresh = [(np.array(row), sample) for sample, row in enumerate(follows) if fresh[sample // SIZE]]
    left = np.array([number for row, sample in of_fresh for number in row - values[sample]])
    other = np.array([number for row, sample in of_fresh for number in row - others[sample]])
    every = np.array([number for row, _ in of_fresh for number in row])
    by_critic = kind == "critic" or (bool(len(left)) and left.var() < other.var())
    if kind != "critic" and len(left) and abs(left.var() - other.var()) < 1e-6:
        return  # float32 may say otherwise
    assert chosen["value/critic_is_baseline"] == by_critic
    if len(left) and every.var() > 1e-9:
        explained = pytest.approx(1 - left.var() / every.var(), rel=1e-3, abs=1e-4)
        assert chosen["value/explained_variance_fresh"] == explained
    plain, nothing, _ = choice_of(**given | {"fresh": None})
    assert nothing == {}
    assert by_sample(experiences, "returns") == by_sample(plain, "returns")  # the critic trains either way
    actual = by_sample(experiences, "advantages")
    if by_critic:
        assert actual == by_sample(plain, "advantages")
        return
    wanted = whitened([np.array(row) - others[sample] for sample, row in enumerate(follows)])
    for row, other in zip(actual, wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("returns", ["gae", "vtrace"])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 2.0])
def test_lambda_by_length(returns, alpha):
    """Each response has a lambda of its own; those of less than 1 / alpha tokens have 0. The returns keep lambda 1."""
    rewards = [1.0, 0.0, 0.5, 1.0, 0.0, 1.0]
    words = {"adapt__length_adaptive_lambd": alpha, "adapt__returns": returns, "algo__advantage__no_std_norm": True}
    ratios, samples = [row * (returns == "vtrace") for row in off_policy(6)], made_up(rewards)
    groups = [*map(whole_group, range(6))]
    set_advantages(samples, groups, maker("gae", **words).args, kl_coefficient=0.0, log_ratios=ratios)
    wanted, seen = [], set()
    for sample, (one, ratio) in enumerate(zip(samples, ratios, strict=True)):
        mask = MASKS[sample % len(MASKS)].numpy()
        lambd = max(0.0, 1 - 1 / (alpha * int(mask.sum())))
        seen.add(lambd)
        earned = np.zeros(len(mask))
        earned[mask.nonzero()[0][-1]] = rewards[sample]
        about = one.values[0].tolist(), earned, ratio[0], mask, 1.0
        (advantages, _), (_, targets) = by_definition(*about, lambd), by_definition(*about, 1.0)
        wanted.append(np.array(advantages)[mask == 1])
        assert by_sample([one], "returns")[0] == pytest.approx(np.array(targets)[mask == 1], abs=1e-5)
    assert len(seen) > 1 or alpha == 0.05
    mean = np.concatenate(wanted).mean()
    for row, other in zip(by_sample(samples, "advantages"), wanted, strict=True):
        assert row == pytest.approx(other - mean, abs=1e-5)


def test_a_run_chooses_on_fresh_groups(fitted):
    """With the values of the fake critic, which knows nothing: the advantages of every step are those of the means."""
    run = fitted(algorithm="ba_ppo", **{"adapt.critic_baseline": "group"})
    for (_, experiences), row in zip(run.trained, run.metrics(), strict=True):
        assert row["value/critic_is_baseline"] == 0 and row["value/explained_variance_fresh"] < 0
        groups = torch.cat([e.rewards for e in experiences]).view(-1, 4)
        relative = (groups - (groups.sum(1, keepdim=True) - groups) / 3).flatten().tolist()
        samples = by_position(experiences)
        wanted = whitened([[relative[place]] * len(samples[place][0][2:]) for place in sorted(samples)])
        for place, (*_, advantages, _) in samples.items():
            assert advantages == pytest.approx(wanted[place], abs=1e-4)

"""V-trace: Eq. 1 of arXiv 1802.01561 term by term, GAE on-policy, and expectations over all responses of a chain."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402

from bapo_openrlhf.adapt.vtrace import vtrace  # noqa: E402

UNTRUNCATED = {"rho_max": math.inf, "c_max": math.inf}
DISCOUNTS = [(1.0, 1.0), (0.97, 1.0), (1.0, 0.9), (0.9, 0.8), (0.7, 0.0), (0.0, 0.5)]
TRUNCATIONS = [(1.0, 1.0), (2.0, 1.0), (0.5, 0.25), (math.inf, math.inf), (math.inf, 1.0)]  # rho_max, c_max
# A whole turn, padding on both sides, two turns, one token.
MASK = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0]])


def numbers(seed: int = 0, shape: tuple[int, int] = MASK.shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, rewards and log-ratios."""
    return tuple(np.random.Generator(np.random.PCG64(seed)).normal(size=(3, *shape)))


def slow(values, rewards, log_ratios, gamma, lambd, rho_max, c_max) -> tuple[list[float], list[float]]:
    """One row without a mask: v_s as the double sum of Eq. 1, with c_i of Remark 2; advantages from these v_s."""
    length = len(values)
    after = [*values, 0.0]
    deltas = [rewards[t] + gamma * after[t + 1] - after[t] for t in range(length)]
    targets = []
    for s in range(length):
        target = values[s]
        for t in range(s, length):
            traces = math.prod(lambd * min(c_max, math.exp(log_ratios[i])) for i in range(s, t))
            target += gamma ** (t - s) * traces * min(rho_max, math.exp(log_ratios[t])) * deltas[t]
        targets.append(target)
    beyond = [*targets, 0.0]
    advantages = [deltas[s] + gamma * lambd * (beyond[s + 1] - after[s + 1]) for s in range(length)]
    return advantages, targets


@pytest.mark.parametrize(("gamma", "lambd"), DISCOUNTS)
class TestOnPolicyIsGAE:
    def test_by_its_definition(self, gamma, lambd):
        """A_s = sum over l of (gamma lambda)^l delta_{s+l}; a return is A_s + V_s. Values and rewards masked by 0."""
        values, rewards, _ = numbers()
        advantages, returns = vtrace(values, rewards, np.zeros(MASK.shape), MASK, gamma=gamma, lambd=lambd)
        for row in range(len(MASK)):
            v = [*(values[row] * MASK[row]), 0.0]
            deltas = [rewards[row, t] * MASK[row, t] + gamma * v[t + 1] - v[t] for t in range(6)]
            for s in range(6):
                wanted = math.fsum((gamma * lambd) ** (t - s) * deltas[t] for t in range(s, 6))
                assert advantages[row, s] == pytest.approx(wanted, abs=1e-12)
                assert returns[row, s] == pytest.approx(wanted + v[s], abs=1e-12)

    @pytest.mark.parametrize(("rho_max", "c_max"), [(1.0, 1.0), (4.0, 2.0)])
    def test_is_openrlhfs_to_the_last_bit(self, gamma, lambd, rho_max, c_max):
        values, rewards, _ = numbers(1)
        result = vtrace(
            values, rewards, np.zeros(MASK.shape), MASK, gamma=gamma, lambd=lambd, rho_max=rho_max, c_max=c_max
        )
        theirs = RemoteExperienceMaker.get_advantages_and_returns(
            SimpleNamespace(), torch.tensor(values), torch.tensor(rewards), torch.tensor(MASK), gamma, lambd
        )
        for ours, other in zip(result, theirs, strict=True):
            assert ours.dtype == np.float64
            assert np.array_equal(ours, other.numpy())


class TestEquation1:
    @pytest.mark.parametrize(("gamma", "lambd"), DISCOUNTS)
    @pytest.mark.parametrize(("rho_max", "c_max"), TRUNCATIONS)
    def test_matches_the_double_sum(self, gamma, lambd, rho_max, c_max):
        given = numbers(2, (5, 7))
        advantages, targets = vtrace(*given, np.ones((5, 7)), gamma=gamma, lambd=lambd, rho_max=rho_max, c_max=c_max)
        for row in range(5):
            wanted = slow(*(array[row] for array in given), gamma, lambd, rho_max, c_max)
            assert advantages[row] == pytest.approx(wanted[0], rel=1e-12, abs=1e-12)
            assert targets[row] == pytest.approx(wanted[1], rel=1e-12, abs=1e-12)


# --- a chain whose responses can be counted ---------------------------------------------------------------------------

END, LENGTH = 0, 3  # tokens 0, 1, 2; a response ends with token 0 or after three tokens


class Chain:
    """All 15 responses of at most three tokens, with random policies and rewards that depend on what came before."""

    def __init__(self, seed: int) -> None:
        rng = np.random.Generator(np.random.PCG64(seed))
        self.prefixes = [(), (1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]
        self.mu, self.pi = ({p: rng.dirichlet(np.ones(3)) for p in self.prefixes} for _ in range(2))
        self.reward = {p: rng.normal(size=3) for p in self.prefixes}
        self.responses = [
            (*prefix, token)
            for prefix in self.prefixes
            for token in range(3)
            if token == END or len(prefix) == LENGTH - 1
        ]
        self.random_values = {p: 3 * rng.normal() for p in self.prefixes}
        self.padding = rng.normal(size=(3, LENGTH))

    def action_values(self, policy: dict, gamma: float) -> dict:
        """Q by backward induction: Q(prefix, token), for each prefix."""
        q: dict = {}
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            after = [q.get((*prefix, token)) for token in range(3)]
            following = [0.0 if x is None else policy[(*prefix, t)] @ x for t, x in enumerate(after)]
            q[prefix] = self.reward[prefix] + gamma * np.array(following)
        return q

    def values(self, policy: dict, gamma: float) -> dict:
        """V of each prefix under a policy."""
        return {prefix: policy[prefix] @ q for prefix, q in self.action_values(policy, gamma).items()}

    def truncated(self, rho_max: float) -> dict:
        """pi_rho of the paper, proportional to min(rho_max mu, pi)."""
        least = {p: np.minimum(rho_max * self.mu[p], self.pi[p]) for p in self.prefixes}
        return {p: weights / weights.sum() for p, weights in least.items()}

    def expected(self, values: dict, **options: float) -> tuple[dict, dict]:
        """E over the responses of mu of v_s given each prefix, and of A_s given each prefix and its next token."""
        rows = np.tile(self.padding[:, None], (1, len(self.responses), 1))  # what is behind a response does not count
        mask = np.zeros(rows.shape[1:])
        for row, response in enumerate(self.responses):
            for s, token in enumerate(response):
                prefix = response[:s]
                ratio = self.pi[prefix][token] / self.mu[prefix][token]
                rows[:, row, s] = values[prefix], self.reward[prefix][token], math.log(ratio)
                mask[row, s] = 1
        advantages, targets = vtrace(*rows, mask, **options)
        mean_target = {prefix: 0.0 for prefix in self.prefixes}
        mean_advantage = {prefix: np.zeros(3) for prefix in self.prefixes}
        for row, response in enumerate(self.responses):
            for s in range(len(response)):
                prefix, token = response[:s], response[s]
                later = math.prod(self.mu[response[:i]][response[i]] for i in range(s + 1, len(response)))
                mean_target[prefix] += self.mu[prefix][token] * later * targets[row, s]
                mean_advantage[prefix][token] += later * advantages[row, s]
        return mean_target, mean_advantage


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
class TestExpectation:
    def test_untruncated_targets_are_the_values_of_the_current_policy_whatever_the_critic_says(self, seed, gamma):
        chain = Chain(seed)
        current = chain.values(chain.pi, gamma)
        assert current != pytest.approx(chain.values(chain.mu, gamma), abs=1e-2)
        for critic in (chain.random_values, dict.fromkeys(chain.prefixes, 0.0), current):
            result, _ = chain.expected(critic, gamma=gamma, lambd=1.0, **UNTRUNCATED)
            assert result == pytest.approx(current, abs=1e-12)

    def test_untruncated_advantages_are_those_of_the_current_policy(self, seed, gamma):
        # Each token's advantage, not weighted by that token's own ratio.
        chain = Chain(seed)
        _, result = chain.expected(chain.random_values, gamma=gamma, lambd=1.0, **UNTRUNCATED)
        for prefix, q in chain.action_values(chain.pi, gamma).items():
            assert result[prefix] == pytest.approx(q - chain.random_values[prefix], abs=1e-12)

    @pytest.mark.parametrize("lambd", [1.0, 0.6])
    @pytest.mark.parametrize(
        ("rho_max", "c_max"), [(1.0, 1.0), (1.0, 0.3), (1.5, 1.0), (0.5, 0.5), (math.inf, 1.0), (math.inf, math.inf)]
    )
    def test_fixed_point_is_the_policy_between(self, seed, gamma, lambd, rho_max, c_max):
        chain, options = Chain(seed), {"gamma": gamma, "lambd": lambd, "rho_max": rho_max, "c_max": c_max}
        between = chain.truncated(rho_max)
        values = chain.values(between, gamma)
        result, advantages = chain.expected(values, **options)
        assert result == pytest.approx(values, abs=1e-12)
        if lambd == 1.0:
            for prefix, q in chain.action_values(between, gamma).items():
                assert advantages[prefix] == pytest.approx(q - values[prefix], abs=1e-12)

    @pytest.mark.parametrize(("rho_max", "c_max"), [(1.0, 1.0), (1.0, 0.3), (0.5, 0.5)])
    def test_every_critic_gets_there(self, seed, gamma, rho_max, c_max):
        chain, options = Chain(seed), {"gamma": gamma, "lambd": 1.0, "rho_max": rho_max, "c_max": c_max}
        goal, critic, apart = chain.values(chain.truncated(rho_max), gamma), chain.random_values, [math.inf]
        for _ in range(200):
            critic, _ = chain.expected(critic, **options)
            apart.append(max(abs(critic[prefix] - goal[prefix]) for prefix in goal))
            assert apart[-1] <= apart[-2] + 1e-12
        assert apart[1] > 1e-3 and apart[-1] < 1e-9


def test_behaviour_and_current_policy_between_which_the_truncation_moves():
    # pi_rho of `Chain` goes from mu (rho_max near 0) to pi (rho_max from the largest ratio on)
    chain = Chain(0)
    for prefix in chain.prefixes:
        assert chain.truncated(1e-9)[prefix] == pytest.approx(chain.mu[prefix])
        assert chain.truncated(1e9)[prefix] == pytest.approx(chain.pi[prefix])
        assert chain.truncated(1.0)[prefix] != pytest.approx(chain.pi[prefix], abs=1e-2)


# --- masks, rows, extremes --------------------------------------------------------------------------------------------

OPTIONS = {"gamma": 0.9, "lambd": 0.8, "rho_max": 1.5, "c_max": 1.0}


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_at_masked_positions_changes_nothing(junk):
    given = numbers(5)
    changed = tuple(np.where(MASK, array, junk) for array in given)
    with np.errstate(all="raise", under="ignore"):
        for clean, other in zip(vtrace(*given, MASK, **OPTIONS), vtrace(*changed, MASK, **OPTIONS), strict=True):
            assert np.array_equal(clean, other)


def test_padding_behind_a_response_changes_nothing():
    given, ones = numbers(6), np.ones(MASK.shape)
    padded = (np.pad(array, ((0, 0), (0, 3)), constant_values=7.0) for array in given)
    longer = vtrace(*padded, np.pad(ones, ((0, 0), (0, 3))), **OPTIONS)
    for ours, other in zip(vtrace(*given, ones, **OPTIONS), longer, strict=True):
        assert np.array_equal(ours, other[:, :-3])
        assert not other[:, -3:].any()


@pytest.mark.parametrize("limit", [1.0, 2.0, math.inf])
def test_gap_between_turns_can_be_left_out(limit):
    values, rewards, log_ratios = numbers(7, (1, 7))
    gap = np.array([[1, 1, 0, 0, 1, 0, 1]])
    options = {"gamma": 1.0, "lambd": 1.0, "rho_max": limit, "c_max": limit}
    result = vtrace(values, rewards, log_ratios, gap, **options)
    kept = gap[0].astype(bool)
    without = vtrace(values[:, kept], rewards[:, kept], log_ratios[:, kept], np.ones((1, 4)), **options)
    for ours, other in zip(result, without, strict=True):
        assert ours[:, kept] == pytest.approx(other, abs=1e-12)


def test_large_ratios_are_truncated_before_they_overflow():
    values, rewards, _ = numbers(8, (1, 4))
    extreme = np.array([[1e5, -1e5, math.inf, -math.inf]])
    limits = np.array([[math.log(1.5), -math.inf, math.log(1.5), -math.inf]])
    with np.errstate(all="raise", under="ignore"):
        result = vtrace(values, rewards, extreme, np.ones((1, 4)), **OPTIONS)
    for ours, other in zip(result, vtrace(values, rewards, limits, np.ones((1, 4)), **OPTIONS), strict=True):
        assert np.isfinite(ours).all() and np.array_equal(ours, other)


def test_any_number_type_comes_out_as_float64_and_the_input_stays():
    given = tuple(array.astype(np.float32) for array in numbers(9))
    before = [array.copy() for array in given]
    for mask in (MASK.astype(bool), MASK.astype(np.float32)):
        actual = vtrace(*given, mask, **OPTIONS)
        wanted = vtrace(*(array.astype(np.float64) for array in given), MASK, **OPTIONS)
        for ours, other in zip(actual, wanted, strict=True):
            assert ours.dtype == np.float64 and np.array_equal(ours, other)
    assert all(np.array_equal(array, old) for array, old in zip(given, before, strict=True))


def test_default_truncation_is_1():
    given = numbers(10)
    for ours, other in zip(
        vtrace(*given, MASK, gamma=0.9, lambd=0.8),
        vtrace(*given, MASK, gamma=0.9, lambd=0.8, rho_max=1.0, c_max=1.0),
        strict=True,
    ):
        assert np.array_equal(ours, other)


@pytest.mark.parametrize(("rho_max", "c_max"), [(1.0, 1.1), (0.5, 1.0), (1.0, 0.0), (1.0, -1.0), (math.nan, 1.0)])
def test_truncations_that_make_no_sense(rho_max, c_max):
    with pytest.raises(
        ValueError, match=f"c_max is {c_max} and rho_max is {rho_max}; c_max must be above 0 and at most"
    ):
        vtrace(*numbers(), MASK, gamma=1.0, lambd=1.0, rho_max=rho_max, c_max=c_max)

"""Theorem 3.2: the constants K1, K2, K3, sampled TV distances, importance ratios, the terms of the lower bound."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.theory import bound_term, importance_summary, k1, k2, k3, sampled_tv, stability_constant


class TestConstants:
    def test_by_hand_without_smoothing(self):
        assert stability_constant(0.16, eps=0.0) == pytest.approx(1.5)  # sigma 2/5
        assert k1(10, eps=0.0) == pytest.approx(7 / 3)  # 9/100
        assert k2(0.5, eps=0.0) == 1.0
        assert k2(0.2, eps=0.0) == pytest.approx(1.5)
        assert k3(0.5, 0.8, eps=0.0) == pytest.approx(1.5)  # the upper end is the worse one
        assert k3(0.2, 0.5, eps=0.0) == pytest.approx(1.5)  # the lower end is the worse one
        assert k1(8, eps=0.0) == pytest.approx(8 / math.sqrt(7) - 1, rel=1e-14)  # Table 3
        assert k3(4 / 8, 5 / 8, eps=0.0) == pytest.approx(8 / math.sqrt(15) - 1, rel=1e-14)

    def test_eps_is_added_to_the_variance_under_the_root(self):
        assert stability_constant(0.0, eps=0.25) == 1.0
        assert stability_constant(0.0) == pytest.approx(999.0)  # sigma 1/1000: the mini-test's c1 = 0 stays finite
        assert k1(8) < k1(8, eps=0.0) and k2(0.1) < k2(0.1, eps=0.0) and k3(0.1, 0.2) < k3(0.1, 0.2, eps=0.0)

    @given(ends=st.tuples(st.floats(0, 1), st.floats(0, 1)), inside=st.floats(0, 1))
    def test_k3_bounds_every_mean_between_its_thresholds(self, ends, inside):
        low, high = sorted(ends)
        mean = low + inside * (high - low)
        assert stability_constant(mean * (1 - mean)) <= k3(low, high) * (1 + 1e-9)


def exact_tv(p, q) -> float:
    return 0.5 * float(np.abs(np.asarray(p) - np.asarray(q)).sum())


class TestSampledTV:
    @pytest.mark.parametrize("policy", [(0.5, 0.25, 0.125, 0.125), (0.0, 0.9, 0.05, 0.05), (0.7, 0.1, 0.1, 0.1)])
    def test_all_responses_in_exact_proportion_give_the_exact_distance(self, policy):
        behaviour = (4 / 8, 2 / 8, 1 / 8, 1 / 8)
        responses = [0] * 4 + [1] * 2 + [2] + [3]
        with np.errstate(divide="ignore"):
            log_ratios = np.log([policy[y] / behaviour[y] for y in responses])
        assert sampled_tv(log_ratios) == pytest.approx(exact_tv(policy, behaviour), abs=1e-15)

    def test_huge_ratios_do_not_overflow(self):
        with np.errstate(all="raise"):
            assert sampled_tv(np.array([1e300, math.inf])) == 0.0
            assert sampled_tv(np.array([-1e300, -math.inf])) == 1.0
            assert sampled_tv(np.array([1e6, -1e6])) == 0.5

    def test_tiny_ratios_keep_their_digits(self):
        assert sampled_tv(np.array([-1e-12])) == pytest.approx(1e-12, rel=1e-9)


def share(ratios: list[Fraction]) -> Fraction:
    """Kish's effective sample size by its definition, as a share."""
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios))


class TestImportanceSummary:
    @given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12), st.integers(-200, 200))
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_matches_exact_arithmetic_at_any_scale(self, terms, scale):
        ratios = [Fraction(*term) for term in terms]
        logs = np.array([math.log(ratio) for ratio in ratios])
        result = importance_summary(logs)
        assert result["mean"] == pytest.approx(float(sum(ratios) / len(ratios)), rel=1e-12)
        assert result["max"] == pytest.approx(float(max(ratios)), rel=1e-12)
        assert result["effective_share"] == pytest.approx(float(share(ratios)), rel=1e-12)
        assert importance_summary(logs + scale)["effective_share"] == pytest.approx(float(share(ratios)), rel=1e-9)

    def test_at_both_ends(self):
        assert importance_summary(np.array([-1000.0, -1000.0])) == {"mean": 0.0, "max": 0.0, "effective_share": 1.0}
        cap = math.exp(20)
        with np.errstate(all="raise", under="ignore"):
            far, near = importance_summary(np.array([1000.0, -1000.0])), importance_summary(np.array([40.0, 30.0]))
        assert far == pytest.approx({"mean": cap / 2, "max": cap, "effective_share": 0.5})
        # the share is that of the ratios as they are: one of e^40 and e^30 is all there is
        share = 0.5 * (1 + math.exp(-10)) ** 2 / (1 + math.exp(-20))
        assert near == pytest.approx({"mean": cap, "max": cap, "effective_share": share})


class TestBoundTerm:
    @given(
        behaviour=st.lists(st.integers(1, 20), min_size=5, max_size=5),
        policy=st.lists(st.integers(0, 20), min_size=5, max_size=5).filter(any),
        rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=5, max_size=5).filter(lambda r: 0 < sum(r) < 5),
    )
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_is_a_lower_bound_of_the_improvement_of_the_policy_over_itself(self, behaviour, policy, rewards):
        """At pi_theta = pi_theta_t the improvement is 0 (Eq. 20), whatever alpha generated the responses."""
        alpha = np.array(behaviour) / sum(behaviour)
        pi = np.array(policy) / sum(policy)
        r = np.array(rewards)
        mu = alpha @ r
        variance = alpha @ (r - mu) ** 2
        surrogate = alpha @ (pi / alpha * (r - mu) / math.sqrt(variance + 1e-6))  # Eq. 22, 23
        assert surrogate == pytest.approx((pi @ r - mu) / math.sqrt(variance + 1e-6), abs=1e-9)  # Eq. 24
        assert bound_term(surrogate, stability_constant(variance), exact_tv(pi, alpha)) <= 1e-12

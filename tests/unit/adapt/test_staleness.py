"""Age in syncs, importance ratios and TV distances of groups, against closed forms and exact sums over responses."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.staleness import beyond, group_tv, importance_summary, nonfinite, sync_age

STEPS = 40


class TestSyncAge:
    @pytest.mark.parametrize("delay", range(1, 9))
    def test_counts_the_multiples_in_between(self, delay):
        for weights_version, step in itertools.combinations_with_replacement(range(STEPS), 2):
            wanted = sum(t % delay == 0 for t in range(weights_version + 1, step + 1))
            assert sync_age(weights_version, step, delay) == wanted


def share(ratios: list[Fraction]) -> Fraction:
    """Kish's effective sample size by its definition, as a share."""
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios))


class TestImportanceSummary:
    @given(
        st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12),
        st.integers(-200, 200),
    )
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_matches_exact_arithmetic_at_any_scale(self, terms, scale):
        ratios = [Fraction(*term) for term in terms]
        logs = np.array([math.log(ratio) for ratio in ratios])
        result = importance_summary(logs)
        assert result["mean"] == pytest.approx(float(sum(ratios) / len(ratios)), rel=1e-12)
        assert result["max"] == pytest.approx(float(max(ratios)), rel=1e-12)
        assert result["effective_share"] == pytest.approx(float(share(ratios)), rel=1e-12)
        assert importance_summary(logs + scale)["effective_share"] == pytest.approx(float(share(ratios)), rel=1e-9)

    @given(st.lists(st.floats(-1000, 1000), min_size=1, max_size=30))
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_no_log_ratio_is_too_large(self, logs):
        with np.errstate(all="raise", under="ignore"):
            result = importance_summary(np.array(logs))
        assert 0 <= result["mean"] <= result["max"] * (1 + 1e-12) and result["max"] <= math.exp(20)
        assert 1 / len(logs) - 1e-12 <= result["effective_share"] <= 1 + 1e-12

    def test_at_both_ends(self):
        assert importance_summary(np.array([-1000.0, -1000.0])) == {"mean": 0.0, "max": 0.0, "effective_share": 1.0}
        cap = math.exp(20)
        assert importance_summary(np.array([1000.0, -1000.0])) == pytest.approx(
            {"mean": cap / 2, "max": cap, "effective_share": 0.5}
        )
        # the share is that of the ratios as they are: one of e^40 and e^30 is all there is
        assert importance_summary(np.array([40.0, 30.0])) == pytest.approx(
            {"mean": cap, "max": cap, "effective_share": 0.5 * (1 + math.exp(-10)) ** 2 / (1 + math.exp(-20))}
        )

    def test_of_responses_in_exact_proportion(self):
        # E[w] = 1 and E[w^2] = sum of pi^2 / alpha, so the share is 1 / sum of pi^2 / alpha
        alpha, pi = np.array([4, 2, 1, 1]) / 8, np.array([0.1, 0.2, 0.3, 0.4])
        result = importance_summary(np.log(np.repeat(pi / alpha, [4, 2, 1, 1])))
        assert result == pytest.approx({"mean": 1.0, "max": 3.2, "effective_share": 1 / np.sum(pi**2 / alpha)})

    def test_float32_is_summed_as_float64(self):
        logs = np.full(3, -1e-3, dtype=np.float32)
        assert importance_summary(logs)["mean"] == pytest.approx(math.exp(float(logs[0])), rel=1e-12)

    def test_of_no_responses(self):
        result = importance_summary(np.array([]))
        assert sorted(result) == ["effective_share", "max", "mean"]
        assert all(math.isnan(value) for value in result.values())


ALPHA, PI = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.1, 0.3, 0.0, 0.6])
DISTANCE = 0.5 * float(np.abs(PI - ALPHA).sum())
with np.errstate(divide="ignore"):
    LOGS = np.log(PI) - np.log(ALPHA)


class TestGroupTV:
    def test_by_hand(self):
        # ratios 1/2 and 4; 0 and 1; 1/4 and 3/4
        with np.errstate(divide="ignore"):
            log_ratios = np.log([0.5, 4.0, 0.0, 1.0, 0.25, 0.75])
        assert group_tv(log_ratios, [2, 2, 2]) == pytest.approx([0.25, 0.5, 0.5])
        assert group_tv(log_ratios, [3, 3]) == pytest.approx([0.5, 1 / 3])
        assert group_tv(log_ratios, [1, 4, 1]) == pytest.approx([0.5, 1.75 / 4, 0.25])
        assert group_tv(log_ratios, [1] * 6) == pytest.approx([0.5, 0.0, 1.0, 0.0, 0.75, 0.25])

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_is_unbiased(self, size):
        """The expectation over all groups of this size, summed exactly."""
        groups = list(itertools.product(range(4), repeat=size))
        chances = [math.prod(ALPHA[y] for y in group) for group in groups]
        distances = group_tv(np.concatenate([LOGS[list(group)] for group in groups]), [size] * len(groups))
        assert math.fsum(chances) == pytest.approx(1.0)
        assert np.dot(chances, distances) == pytest.approx(DISTANCE, abs=1e-12)

    @pytest.mark.parametrize("size", [1, 2, 8])
    def test_spread_reaches_its_bound(self, size):
        # half of the responses impossible today, the other half twice as likely
        chances = [math.comb(size, k) / 2**size for k in range(size + 1)]
        logs = [np.array([-math.inf] * k + [math.log(2)] * (size - k)) for k in range(size + 1)]
        distances = [group_tv(group, [size])[0] for group in logs]
        mean = np.dot(chances, distances)
        assert math.sqrt(np.dot(chances, (distances - mean) ** 2)) == pytest.approx(1 / (2 * math.sqrt(size)))

    def test_groups_do_not_mix_and_large_ratios_do_not_count(self):
        with np.errstate(all="raise"):
            log_ratios = np.array([1000.0, -1000.0, 0.0, 0.0, math.inf, math.inf])
            assert group_tv(log_ratios, [2] * 3).tolist() == [0.5, 0.0, 0.0]

    def test_no_groups(self):
        assert group_tv(np.array([]), []).shape == (0,)


class TestBeyond:
    TV = ((3, 0.1), (4, 0.2), (9, 0.3), (7, 0.0))

    @pytest.mark.parametrize(
        ("limit", "uids"),
        [(None, set()), (0.2, {9}), (0.1999, {4, 9}), (0.0, {3, 4, 9})],
    )
    def test_by_hand(self, limit, uids):
        assert beyond(dict(self.TV), limit) == uids

    def test_a_distance_that_is_no_number_is_not_beyond(self):
        assert beyond({1: math.nan, 2: 0.9}, 0.5) == {2}  # `nonfinite` finds these groups

    def test_of_no_groups(self):
        assert beyond({}, 0.5) == set()


class TestNonfinite:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("position", range(6))
    def test_one_response_is_enough(self, bad, position):
        log_ratios = np.linspace(-1000, 1000, 6)
        log_ratios[position] = bad
        result = nonfinite(log_ratios, [2, 4])
        assert result.dtype == bool and result.tolist() == [position < 2, position >= 2]

    def test_finite_ones(self):
        assert nonfinite(np.array([-1e300, 1e300, 0.0, 1.0]), [2, 2]).tolist() == [False, False]

    def test_no_groups(self):
        assert nonfinite(np.array([]), []).shape == (0,)

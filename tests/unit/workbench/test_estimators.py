"""The estimators agree with all subsets, closed forms, and simulated samples."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.workbench.evaluation import estimators


def test_a_response_whose_judge_failed_is_wrong_in_any_range():
    """The judge's score is 0 then, which is full marks in the second range."""
    for reward_range in ((Fraction(-1), Fraction(1)), (Fraction(-5), Fraction(0))):
        right = float(reward_range[1])
        rows = [{"scores": [0.0, right], "failures": ["time", None]}, {"scores": [right, right]}]
        assert estimators.scores_of(rows, reward_range).tolist() == [[0.0, 1.0], [1.0, 1.0]]


def in_some(right, n, k):
    """Share of the subsets of k of n responses that hold a solved one. The first `right` responses are solved."""
    subsets = list(itertools.combinations(range(n), k))
    return sum(any(i < right for i in subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets(n):
    for k in range(1, n + 1):
        result = estimators.pass_at_k(np.arange(n + 1), n, k)
        np.testing.assert_allclose(result, [in_some(c, n, k) for c in range(n + 1)], rtol=1e-13, atol=1e-15)
    for k in (-1, 0, n + 1):
        with pytest.raises(ValueError, match=f"k is {k}"):
            estimators.pass_at_k(np.array([1]), n, k)


@pytest.mark.parametrize(("n", "k"), [(32, 8), (256, 100), (1000, 500), (1000, 1)])
def test_pass_at_k_keeps_its_digits_for_many_runs(n, k):
    """It equals the fraction of binomials in exact arithmetic, which are up to 10^299."""
    for c in (0, 1, 2, n // 2, n - k, n - k + 1, n):
        exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
        np.testing.assert_allclose(estimators.pass_at_k(np.array([c]), n, k), [float(exact)], rtol=1e-12, atol=1e-15)


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=9))
def test_majority_is_the_vote(responses):
    """The worth of a top answer is the share of solved responses that gave it, and top answers share the vote."""
    votes = Counter(answer for answer, _ in responses if answer is not None)
    tops = [answer for answer, count in votes.items() if count == max(votes.values())]
    worths = [Fraction(sum(s for a, s in responses if a == top), votes[top]) for top in tops]
    wanted = sum(worths) / len(worths) if worths else 0
    assert estimators.majority(*zip(*responses, strict=True)) == pytest.approx(float(wanted), abs=1e-12)


def test_resampled_means_have_the_distribution_of_draws_with_replacement():
    """The mean of three problems is one of ten values. Each is as frequent as the multinomial distribution says."""
    values = np.array([0.0, 1.0, 10.0])
    means = estimators.resampled_means(values, 1, 30_000)
    expected = {}
    for draw in itertools.product(values, repeat=3):
        expected[round(sum(draw) / 3, 9)] = expected.get(round(sum(draw) / 3, 9), 0) + 1 / 27
    actual = dict(zip(*np.unique(means.round(9), return_counts=True), strict=True))
    assert set(actual) == set(expected)
    chi_square = sum((actual[v] - 30_000 * p) ** 2 / (30_000 * p) for v, p in expected.items())
    assert chi_square < 27.9  # 9 degrees of freedom, one in a thousand


def test_statistics_of_the_same_problems_share_the_draws():
    values = np.random.default_rng(0).normal(size=40)
    means = estimators.resampled_means(np.stack([values, 3 - 2 * values], axis=1), 7)
    np.testing.assert_allclose(means[:, 1], 3 - 2 * means[:, 0], atol=1e-12)
    np.testing.assert_allclose(means[:, 0], estimators.resampled_means(values, 7), atol=1e-12)
    assert np.abs(np.corrcoef(means[:, 0], estimators.resampled_means(values, 8))[0, 1]) < 0.05


@pytest.mark.parametrize("resamples", [1, 499, 500, 501, 10_000])
def test_as_many_resamples_as_asked_and_no_two_blocks_alike(resamples):
    means = estimators.resampled_means(np.random.default_rng(0).normal(size=50), [4, 2], resamples)
    assert means.shape == (resamples,) and len(np.unique(means)) == resamples


def test_interval_is_the_middle_95_percent():
    estimate = estimators.estimate(0.3, np.random.default_rng(0).permutation(np.linspace(0, 1, 10_001)))
    assert estimate == pytest.approx({"value": 0.3, "low": 0.025, "high": 0.975})


@pytest.mark.parametrize(("problems", "least"), [(30, 0.91), (200, 0.925)])
def test_interval_covers_the_truth_about_as_often_as_it_says(problems, least):
    """600 benchmarks of problems with a known distribution of difficulty, 8 runs each (standard error 0.009)."""
    hits = 0
    for seed in range(600):
        rng = np.random.default_rng([problems, seed])
        values = rng.binomial(8, rng.beta(0.5, 1.5, size=problems)) / 8
        estimate = estimators.estimate(values.mean(), estimators.resampled_means(values, seed, 1000))
        hits += estimate["low"] <= 0.25 <= estimate["high"]
    assert least < hits / 600 < 0.975

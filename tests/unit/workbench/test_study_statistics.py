"""The statistics of a study, against closed forms, scipy and brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bapo_openrlhf.workbench.study import statistics

UNTIMED = settings(derandomize=True, database=None)
VALUES = st.lists(st.integers(-8, 8).map(lambda value: value / 8), min_size=1, max_size=7)


@UNTIMED
@given(VALUES)
def test_the_mean_has_students_interval(values):
    actual = statistics.mean_interval(values)
    assert actual.value == pytest.approx(np.mean(values)) and actual.count == len(values)
    if len(values) == 1:
        assert actual.low is None and actual.high is None
    elif np.std(values) > 0:
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (actual.low, actual.high) == pytest.approx((expected.low, expected.high))
    else:
        assert actual.low == pytest.approx(actual.value) == actual.high


@UNTIMED
@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=6))
def test_ratios_are_symmetric(ratios):
    result, other = statistics.ratio_interval(ratios), statistics.ratio_interval([1 / ratio for ratio in ratios])
    assert result.value == pytest.approx(stats.gmean(ratios))
    assert (result.low, result.value, result.high) == pytest.approx((1 / other.high, 1 / other.value, 1 / other.low))


def test_the_sign_flip_test_does_not_take_rounding_for_a_difference():
    differences = [0.3 - 0.2, 0.4 - 0.3, 0.2 - 0.1]  # 0.1 up to rounding, each a little other
    assert statistics.sign_flip_p(differences) == pytest.approx(2 / 8)
    assert statistics.sign_flip_p([2 / 30, 0.1, -2 / 30, -0.1]) == 1  # its mean is 0
    assert statistics.sign_flip_p([0.3 - 0.2 - 0.1, 0.7 - 0.6 - 0.1, 0.9 - 0.8 - 0.1]) == 1  # all are 0
    assert statistics.sign([0.3 - 0.2 - 0.1, 0.001, -0.001, 0]).tolist() == [0, 1, -1, 0]


@UNTIMED
@given(
    st.sampled_from([1, 100]),
    st.lists(st.tuples(*[st.fractions(0, 1, max_denominator=60)] * 2), min_size=1, max_size=8),
)
def test_the_sign_flip_test_counts_all_flips_and_ties_are_those_of_exact_fractions(scale, pairs):
    exact = [one - other for one, other in pairs]
    flips = [abs(sum(s * d for s, d in zip(signs, exact, strict=True)))
             for signs in itertools.product((-1, 1), repeat=len(exact))]  # fmt: skip
    rounded = [scale * float(one) - scale * float(other) for one, other in pairs]
    assert statistics.sign_flip_p(rounded) == sum(flip >= abs(sum(exact)) for flip in flips) / len(flips)
    assert statistics.sign(rounded).tolist() == [(d > 0) - (d < 0) for d in exact]


@pytest.mark.parametrize(
    ("pairs", "p"), [*((n, min(1.0, 2 * 0.5**n)) for n in (*range(1, 9), 16)), (20, 1e-5), (60, 1e-5)]
)
def test_the_smallest_p_is_that_of_differences_of_one_sign(pairs, p):
    """Above 16 pairs the measured signs are one of 100,000."""
    assert statistics.sign_flip_p([1.0 + k / 7 for k in range(pairs)]) == pytest.approx(p)
    assert statistics.smallest_p(pairs) == pytest.approx(p)


def test_no_pair_has_no_p_and_many_pairs_have_one():
    assert statistics.sign_flip_p([]) is statistics.sign_flip_p([0.1, float("nan")]) is None
    assert statistics.sign_flip_p([0.0] * 30) == 1
    differences = np.random.default_rng(4).normal(0.4, 1, size=30)
    drawn, normal = statistics.sign_flip_p(differences), stats.ttest_1samp(differences, 0).pvalue
    assert drawn == pytest.approx(normal, abs=0.01)


@UNTIMED
@given(st.lists(st.floats(0, 1), max_size=7))
def test_holms_correction(p_values):
    result = statistics.holm(p_values)
    for index, p in enumerate(p_values):
        # By its definition: the largest of (m - k) p over all smaller ones, ties in their order.
        before = [(value, place) for place, value in enumerate(p_values) if (value, place) <= (p, index)]
        scaled = [(len(p_values) - rank) * value for rank, (value, _) in enumerate(sorted(before))]
        assert result[index] == pytest.approx(min(1, max(scaled)))

"""The statistics of a study, against closed forms, scipy and brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bapo_openrlhf.workbench.study import statistics

UNTIMED = settings(max_examples=100, deadline=None, derandomize=True, database=None)
VALUES = st.lists(st.integers(-8, 8).map(lambda value: value / 8), min_size=1, max_size=7)
SCORES = st.integers(1, 6).flatmap(
    lambda runs: st.integers(1, 3).flatmap(
        lambda tasks: st.lists(
            st.lists(st.integers(0, 4).map(float), min_size=tasks, max_size=tasks), min_size=runs, max_size=runs
        )
    )
)


# ── means and ratios ──


@UNTIMED
@given(VALUES)
def test_the_mean_has_students_interval(values):
    found = statistics.mean_interval(values)
    assert found.value == pytest.approx(np.mean(values)) and found.count == len(values)
    if len(values) == 1:
        assert found.low is None and found.high is None
    elif np.std(values) > 0:
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    else:
        assert found.low == pytest.approx(found.value) == found.high


def test_the_interval_by_hand():
    found = statistics.mean_interval([1, 2, 3])  # s = 1, t = 4.302653 with 2 degrees of freedom
    assert (found.low, found.high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)
    assert statistics.mean_interval([]) is None


def test_the_interval_covers_what_it_says():
    rng = np.random.default_rng(0)
    found = [statistics.mean_interval(rng.normal(3, 2, size=5)) for _ in range(3000)]
    assert sum(one.low <= 3 <= one.high for one in found) / 3000 == pytest.approx(0.95, abs=0.015)


@UNTIMED
@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=6))
def test_ratios_are_symmetric(ratios):
    found, other = statistics.ratio_interval(ratios), statistics.ratio_interval([1 / ratio for ratio in ratios])
    assert found.value == pytest.approx(stats.gmean(ratios))
    assert (found.low, found.value, found.high) == pytest.approx((1 / other.high, 1 / other.value, 1 / other.low))


# ── aggregates ──


def interquartile_mean(values):
    """The definition: the mean without the floor(n / 4) lowest and the floor(n / 4) highest values."""
    values = sorted(values)
    cut = len(values) // 4
    middle = values[cut : len(values) - cut]
    return sum(middle) / len(middle)


@UNTIMED
@given(SCORES)
def test_iqm_is_the_mean_of_the_middle_half(scores):
    assert statistics.iqm_interval(np.array(scores)).value == pytest.approx(
        interquartile_mean(itertools.chain(*scores))
    )


@UNTIMED
@given(SCORES)
def test_the_interval_of_the_iqm_is_within_the_scores(scores):
    found = statistics.iqm_interval(np.array(scores))
    assert found.count == len(scores)
    if len(scores) == 1:
        assert found.low is None and found.high is None
    else:
        assert np.min(scores) <= found.low <= found.high <= np.max(scores)


def test_the_bootstrap_draws_whole_runs():
    # Two runs that are the same on all benchmarks: drawn whole, each resample is (a, a), (a, b) or (b, b), with
    # chances 1/4, 1/2, 1/4, and the interval is from a to b. Drawn on their own, 40 benchmarks would average out.
    scores = np.array([[0.0] * 40, [1.0] * 40])
    found = statistics.iqm_interval(scores)
    assert (found.low, found.high) == (0.0, 1.0)


def test_resamples_are_trimmed_too():
    # 3 of 12 are cut at each end, so the outlier shows where a resample has 4 or more of it: in 1.6 %.
    found = statistics.iqm_interval(np.array([[0.0]] * 11 + [[1000.0]]))
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_the_bootstrap_of_many_runs_covers():
    rng = np.random.default_rng(1)
    covered = 0
    for number in range(200):
        found = statistics.iqm_interval(rng.normal(1, 1, size=(40, 2)), seed=number)
        covered += found.low <= 1 <= found.high
    assert 0.89 <= covered / 200 <= 0.99


@UNTIMED
@given(SCORES)
def test_the_profile_counts_scores_above(scores):
    at = np.array([-1.0, 0.0, 1.5, 2.0, 9.0])
    flat = list(itertools.chain(*scores))
    expected = [sum(value > place for value in flat) / len(flat) for place in at]
    assert statistics.profile(np.array(scores), at).tolist() == pytest.approx(expected)


@UNTIMED
@given(st.data(), st.integers(1, 3))
def test_improvement_is_mann_whitneys_u(data, tasks):
    row = st.lists(st.integers(0, 4).map(float), min_size=tasks, max_size=tasks)
    ours, theirs = (np.array(data.draw(st.lists(row, min_size=1, max_size=5))) for _ in range(2))
    expected = [
        stats.mannwhitneyu(ours[:, task], theirs[:, task]).statistic / (len(ours) * len(theirs))
        for task in range(tasks)
    ]
    assert statistics.improvement(ours, theirs).value == pytest.approx(np.mean(expected))


def test_improvement_by_hand_and_its_interval():
    ours, theirs = np.array([[1.0], [3.0]]), np.array([[1.0], [2.0], [0.0]])
    assert statistics.improvement(ours, theirs).value == pytest.approx(
        (1 + 0.5 + 1 + 1 + 1) / 6
    )  # 1 > 0, 1 = 1, 3 > all
    rng = np.random.default_rng(2)
    apart = statistics.improvement(rng.normal(9, 1, (5, 2)), rng.normal(0, 1, (5, 2)))
    assert (apart.low, apart.value, apart.high) == (1, 1, 1)
    alike = statistics.improvement(rng.normal(0, 1, (30, 2)), rng.normal(0, 1, (30, 2)))
    assert 0 < alike.low < alike.value < alike.high < 1 and alike.high - alike.low > 0.1
    assert statistics.improvement(ours[:1], theirs).low is None


def test_the_interval_of_an_improvement_covers():
    rng = np.random.default_rng(3)
    covered = 0
    truth = stats.norm.cdf(0.5 / 2**0.5)
    for number in range(150):
        found = statistics.improvement(rng.normal(0.5, 1, (30, 1)), rng.normal(0, 1, (30, 1)), seed=number)
        covered += found.low <= truth <= found.high
    assert covered / 150 >= 0.88


# ── tests ──


def flips_at_least_as_far(differences):
    """The p value, from all 2^n sign flips one by one."""
    measured = abs(sum(differences))
    flips = list(itertools.product((-1, 1), repeat=len(differences)))
    far = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= measured - 1e-12 for signs in flips]
    return sum(far) / len(flips)


@UNTIMED
@given(VALUES)
def test_the_sign_flip_test_counts_all_flips(differences):
    assert statistics.sign_flip_p(differences) == pytest.approx(flips_at_least_as_far(differences))


def test_the_sign_flip_test_does_not_take_rounding_for_a_difference():
    differences = [0.3 - 0.2, 0.4 - 0.3, 0.2 - 0.1]  # 0.1 up to rounding, each a little other
    assert statistics.sign_flip_p(differences) == pytest.approx(2 / 8)


@pytest.mark.parametrize("pairs", range(1, 9))
def test_the_smallest_p_is_that_of_differences_of_one_sign(pairs):
    assert statistics.sign_flip_p([1.0 + k / 7 for k in range(pairs)]) == pytest.approx(statistics.smallest_p(pairs))
    assert statistics.smallest_p(pairs) == min(1.0, 2 * 0.5**pairs)


def test_no_pair_has_no_p_and_many_pairs_have_one():
    assert statistics.sign_flip_p([]) is None
    assert statistics.sign_flip_p([0.0] * 30) == 1
    rng = np.random.default_rng(4)
    differences = rng.normal(0.4, 1, size=30)
    drawn, normal = statistics.sign_flip_p(differences), stats.ttest_1samp(differences, 0).pvalue
    assert drawn == pytest.approx(normal, abs=0.01)


@UNTIMED
@given(st.lists(st.floats(0, 1), max_size=7))
def test_holms_correction(p_values):
    found = statistics.holm(p_values)
    count = len(p_values)
    for index, p in enumerate(p_values):
        # By its definition: the largest of (m - k) p over all smaller ones, ties in their order.
        before = [(value, place) for place, value in enumerate(p_values) if (value, place) <= (p, index)]
        scaled = [(count - rank) * value for rank, (value, _) in enumerate(sorted(before))]
        assert found[index] == pytest.approx(min(1, max(scaled)))


def test_holms_correction_by_hand():
    assert statistics.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert statistics.holm([]) == []

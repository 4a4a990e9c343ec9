"""The statistics of a study, against closed forms and scipy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bapo_openrlhf.workbench.study import statistics

UNTIMED = settings(max_examples=100, derandomize=True, database=None)
VALUES = st.lists(st.integers(-8, 8).map(lambda value: value / 8), min_size=1, max_size=7)


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

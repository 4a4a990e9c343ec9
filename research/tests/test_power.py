"""The chances of the primary comparisons, against scipy's exact tests and the closed form of Student's."""

import numpy as np
import pandas as pd
import power
import pytest
from scipy import stats

from bapo_openrlhf.workbench.study.statistics import smallest_p


def students_chance(effect: float, pairs: int, alpha: float) -> float:
    """The power of Student's two-sided test, which that of sign flips comes close to with normal differences."""
    critical, shift = stats.t.ppf(1 - alpha / 2, pairs - 1), effect * np.sqrt(pairs)
    return stats.nct.sf(critical, pairs - 1, shift) + stats.nct.cdf(-critical, pairs - 1, shift)


@pytest.mark.parametrize("pairs", [3, 8])
def test_each_row_has_the_exact_p(pairs):
    rows = np.random.default_rng(1).normal(0.5, 1, (6, pairs))
    exact = [
        stats.permutation_test((row,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue for row in rows
    ]
    assert power.sign_flip_ps(rows) == pytest.approx(exact)


@pytest.mark.parametrize("effect", [0.0, 0.5, 1.0, 1.5])
def test_the_chance_is_about_that_of_students_test(effect):
    assert power.chance(effect, 10, 0.05) == pytest.approx(students_chance(effect, 10, 0.05), abs=0.025)


def test_what_is_seen_is_found_with_the_chance_that_counts_as_often():
    least = power.seen(10, 0.05)
    assert power.chance(least, 10, 0.05) >= power.OFTEN > power.chance(least - power.PRECISE, 10, 0.05)
    assert students_chance(least, 10, 0.05) == pytest.approx(power.OFTEN, abs=0.03)
    assert power.seen(4, smallest_p(4)) == np.inf > power.seen(4, 1.01 * smallest_p(4))


def test_a_comparison_is_one_of_its_family():
    """Three comparisons, of which one has no interval: p has to be below a third of alpha."""
    differences = np.random.default_rng(2).normal(1, 4, (2, 6))
    intervals = [stats.ttest_1samp(one, 0).confidence_interval() for one in differences]
    rows = [
        {"question": name, "pairs": 6, "low": interval.low, "high": interval.high, "counts": 2.0}
        for name, interval in zip("ab", intervals, strict=True)
    ]
    table = power.power(pd.DataFrame([*rows, {"question": "c", "pairs": 0, "counts": 3.0}]), 0.15)
    assert list(table["question"]) == ["a", "b"]
    assert list(table["sd"]) == pytest.approx(list(differences.std(axis=1, ddof=1)))
    for row in table.to_dict("records"):
        assert row["seen"] / row["sd"] == power.seen(6, 0.05)
        for name, points in (("chance of what counts", 2), ("chance of twice as much", 4)):
            assert row[name] == power.chance(points / row["sd"], 6, 0.05)

"""Statistics of few seeds: means and ratios with intervals, and paired tests. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEVEL = 0.95
MAX_EXACT = 16  # up to so many pairs, all sign flips are counted
DRAWN_FLIPS = 99_999  # so many sign flips are drawn if there are more pairs
ROUNDING = 1e-9  # shares or points that differ by at most this are equal; differences of floats up to 100 err by 1e-14


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval. `low` and `high` are None if there is only one run, which shows no spread."""

    value: float
    low: float | None
    high: float | None
    count: int


def mean_interval(values: ArrayLike) -> Estimate | None:
    """Mean with Student's interval, mean +- t(n - 1) s / sqrt(n). The result is None if there is no value.

    The interval is exact for normal values, and nearly exact for accuracies, which are means over many questions. With
    5 runs a bootstrap interval would cover about 84 % instead of 95 %. If all values are equal, the width is 0.
    """
    numbers = np.asarray(values, dtype=float)
    count = len(numbers)
    if count == 0:
        return None
    mean = float(numbers.mean())
    if count == 1:
        return Estimate(mean, None, None, 1)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * numbers.std(ddof=1) / np.sqrt(count))
    return Estimate(mean, mean - half, mean + half, count)


def ratio_interval(ratios: ArrayLike) -> Estimate | None:
    """Geometric mean of ratios above 0, with the interval of `mean_interval` on their logarithms."""
    logs = mean_interval(np.log(np.asarray(ratios, dtype=float)))
    if logs is None:
        return None
    low, high = (None if end is None else float(np.exp(end)) for end in (logs.low, logs.high))
    return Estimate(float(np.exp(logs.value)), low, high, logs.count)


# ── paired tests ──


def sign_flip_p(differences: ArrayLike) -> float | None:
    """Two-sided p value of Fisher's randomisation test on paired differences. None without pairs, or if one is NaN.

    p is the share of the 2^n sign flips whose mean is at least as far from 0 as the measured mean, or nearer by at most
    ROUNDING. All are counted up to MAX_EXACT pairs; beyond, the measured signs and DRAWN_FLIPS others.
    """
    numbers = np.asarray(differences, dtype=float)
    if not len(numbers) or np.isnan(numbers).any():
        return None
    if len(numbers) <= MAX_EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(numbers))))
    else:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(DRAWN_FLIPS + 1, len(numbers)))
        signs[0] = 1.0
    means = np.abs(signs @ numbers) / len(numbers)
    return float(np.mean(means >= abs(numbers.mean()) - ROUNDING))


def sign(differences: ArrayLike) -> np.ndarray:
    """1, 0 or -1 for each difference; 0 if it is at most ROUNDING."""
    numbers = np.asarray(differences, dtype=float)
    return np.where(np.abs(numbers) <= ROUNDING, 0.0, np.sign(numbers))


def smallest_p(pairs: int) -> float:
    """The smallest p value that `sign_flip_p` can have: 2 of all 2^n flips, or the measured signs among drawn ones."""
    return min(1.0, 2.0 ** (1 - pairs)) if pairs <= MAX_EXACT else 1 / (DRAWN_FLIPS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of m p values (1979): the k-th smallest, counted from 0, is multiplied by m - k.

    A corrected value is at least the one before it, and at most 1. If these values are compared with alpha, the chance
    of any false rejection is at most alpha, also if the tests depend on each other.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, dtype=float)[order] * (len(order) - np.arange(len(order)))
    result = np.empty(len(order))
    result[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return result.tolist()

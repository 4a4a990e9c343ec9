"""Statistics of few seeds: means and ratios with intervals. Pure.

A run is one seed of an arm.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEVEL = 0.95


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
    found = np.asarray(values, dtype=float)
    count = len(found)
    if count == 0:
        return None
    mean = float(found.mean())
    if count == 1:
        return Estimate(mean, None, None, 1)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * found.std(ddof=1) / np.sqrt(count))
    return Estimate(mean, mean - half, mean + half, count)


def ratio_interval(ratios: ArrayLike) -> Estimate | None:
    """Geometric mean of ratios above 0, with the interval of `mean_interval` on their logarithms.

    A doubling weighs as much as a halving.
    """
    logs = mean_interval(np.log(np.asarray(ratios, dtype=float)))
    if logs is None:
        return None
    low, high = (None if end is None else float(np.exp(end)) for end in (logs.low, logs.high))
    return Estimate(float(np.exp(logs.value)), low, high, logs.count)

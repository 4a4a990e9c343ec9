"""What the primary comparisons of decision_design.md could see: how often their test finds a true difference.

The differences of the pairs are normal, with the standard deviation of the pairs that were run. A comparison is *found*
if it would be won as the first one of its family: its p, times the comparisons of the family, is below `alpha`.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from bapo_openrlhf.workbench.study.statistics import LEVEL, ROUNDING

DRAWS = 20_000
OFTEN = 0.8  # the chance of what a comparison "can see"
PRECISE = 0.01  # of a standard deviation


def sign_flip_ps(differences: np.ndarray) -> np.ndarray:
    """The p of the exact two-sided sign-flip test of each row, shape (rows, pairs): as `sign_flip_p`, for many rows."""
    signs = np.array(list(product((1, -1), repeat=differences.shape[1] - 1)))  # the first sign stays: |sum| is the same
    sums = np.abs(differences[:, :1] + differences[:, 1:] @ signs.T)  # the first column has the differences as they are
    return (sums >= sums[:, :1] - ROUNDING).mean(axis=1)


def chance(effect: float, pairs: int, most_p: float) -> float:
    """How often p is below `most_p` if the true difference is `effect` standard deviations of the differences."""
    noise = np.random.default_rng(0).normal(size=(DRAWS, pairs))  # the same for all effects: the chance rises with them
    return float((sign_flip_ps(noise + effect) < most_p).mean())


@cache
def seen(pairs: int, most_p: float) -> float:
    """The least effect, in standard deviations, that is found with the chance OFTEN; inf if no p is so small."""
    if 2 / 2**pairs >= most_p:
        return np.inf
    low, high = 0.0, 8.0
    while high - low > PRECISE:
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle, pairs, most_p) >= OFTEN else (middle, high)
    return high


def power(comparisons: pd.DataFrame, alpha: float) -> pd.DataFrame:
    """What each comparison could see.

    Args:
        comparisons: What `decision.primary` returns. Those without an interval, or with one of width 0, are left out,
            and count in the family.

    Returns:
        A row for each: question, sd (of the pairs' differences), seen (the true difference that is found with the
        chance OFTEN), and the chances to find the smallest difference that counts, and twice as much. Points.
    """
    rows, most_p = [], alpha / len(comparisons)
    for row in comparisons[comparisons["low"] < comparisons["high"]].itertuples():
        half = (row.high - row.low) / 2
        sd = half * np.sqrt(row.pairs) / stats.t.ppf((1 + LEVEL) / 2, row.pairs - 1)
        rows.append({
            "question": row.question, "sd": sd, "seen": sd * seen(row.pairs, most_p),
            "chance of what counts": chance(row.counts / sd, row.pairs, most_p),
            "chance of twice as much": chance(2 * row.counts / sd, row.pairs, most_p),
        })  # fmt: skip
    return pd.DataFrame(rows)

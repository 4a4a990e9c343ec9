"""The estimators of the tables: avg@k, pass@k, maj@n, and bootstrap intervals over problems.

Each of P problems was asked n times. A score is a reward mapped from the task's range to [0, 1] (`rewards.marks`), or 0
if the judge failed. A response is *solved* if its score is at least 1. avg@n is the mean score of a problem ("accuracy
is averaged over 32 runs", Table 1), and the value of a benchmark is the mean over its problems.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.rewards import Range, marks

SOLVED = 1.0
RESAMPLES = 10_000
LEVEL = 0.95
_ROWS = 500  # Resamples that are made at a time, so that they need only some MB.

Estimate = dict[str, float]  # The keys are value, low and high.


def scores_of(rows: Sequence[Mapping[str, Any]], reward_range: Range) -> np.ndarray:
    """The scores of the responses to each problem, from its rows: shape (P, n). A response whose judge failed has 0."""
    scores = marks(np.array([row["scores"] for row in rows]), reward_range)
    for of_problem, row in zip(scores, rows, strict=True):
        of_problem[[failure is not None for failure in row.get("failures", [None] * len(of_problem))]] = 0.0
    return scores


def pass_at_k(right: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased estimate of the probability that at least one of k responses is solved: 1 - C(n - c, k) / C(n, k).

    This is Eq. 1 of arXiv 2107.03374, with the fraction as the product over i < k of (n - c - i) / (n - i), all within
    [0, 1]. `right` is c of each problem, of shape (P,), as the result. A k outside 1..n is a ValueError.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; with {n} responses it must be within 1..{n}")
    wrong, i = n - np.asarray(right)[:, None], np.arange(k)
    return 1.0 - (np.maximum(wrong - i, 0) / (n - i)).prod(axis=1)


def majority(answers: Sequence[Hashable | None], is_solved: Sequence[bool]) -> float:
    """maj@n of one problem: the worth of the most frequent answer among its n responses (arXiv 2203.11171).

    The worth of an answer is the share of its responses that are solved; of tied answers, for which the paper defines
    none, it is their mean. A response without an answer (None) does not vote. A vote without any answer is worth 0.
    """
    by_answer: dict[Hashable, list[bool]] = {}
    for answer, right in zip(answers, is_solved, strict=True):
        by_answer.setdefault(answer, []).append(bool(right))
    by_answer.pop(None, None)
    most = max(map(len, by_answer.values()), default=0)
    return float(np.mean([np.mean(rights) for rights in by_answer.values() if len(rights) == most] or [0.0]))


def resampled_means(values: np.ndarray, seed: int | Sequence[int], resamples: int = RESAMPLES) -> np.ndarray:
    """Bootstrap means, each over P problems drawn with replacement (Efron and Tibshirani 1993, Ch. 6).

    `values` have shape (P,), or (P, S) for S statistics that share the draws, and the result (resamples,) or
    (resamples, S). The same seed and P give the same draws, so samples of different problems need different seeds.
    """
    values = np.asarray(values, dtype=float)
    rng, count = np.random.default_rng(seed), len(values)
    sizes = [min(_ROWS, resamples - start) for start in range(0, resamples, _ROWS)]
    return np.concatenate([values[rng.integers(count, size=(size, count))].mean(axis=1) for size in sizes])


def estimate(value: float, means: np.ndarray) -> Estimate:
    """A value with the percentile interval of its resampled means, shape (resamples,) (Efron and Tibshirani, Ch. 13).

    It covers the choice of the problems and of n responses, but no other training seed, prompt or temperature, and no
    errors of the judge. With 30 problems it is wide (up to about 18 points on each side), and a 95 % interval covers
    about 93 %. If all problems have the same value it has no width, which does not mean certainty.
    """
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"value": float(value), "low": float(low), "high": float(high)}


def with_interval(estimated: Estimate | None, signed: bool = False) -> str:
    """A value and its interval as text with two decimals; "-" for None."""
    if estimated is None:
        return "-"
    sign = "+" if signed else ""
    return f"{estimated['value']:{sign}.2f} [{estimated['low']:{sign}.2f}, {estimated['high']:{sign}.2f}]"

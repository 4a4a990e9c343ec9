"""What the tables are made of: avg@k, pass@k, maj@k, and bootstrap intervals over problems. Pure (numpy only).

P problems were asked n times each; a response has a score, and is *solved* when its score is at least 1 (full marks).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

SOLVED = 1.0
RESAMPLES = 10_000
LEVEL = 0.95
_ROWS = 500  # resamples made at a time: what they take stays some MB


def average(scores: np.ndarray) -> np.ndarray:
    """avg@n of each problem: the mean score of its n responses ("accuracy is averaged over 32 runs", Table 1).

    Args:
        scores: (P, n); need not be 0 or 1.

    Returns:
        (P,). Its mean over problems is the benchmark's value.
    """
    return np.asarray(scores, dtype=float).mean(axis=1)


def solved(scores: np.ndarray) -> np.ndarray:
    """Which responses got full marks: scores (any shape) -> bool of that shape."""
    return np.asarray(scores, dtype=float) >= SOLVED


def pass_at_k(right: np.ndarray, n: int, k: int) -> np.ndarray:
    """Chance that at least one of k responses is solved, unbiased: 1 - C(n - c, k) / C(n, k).

    arXiv 2107.03374, Eq. 1. The fraction is computed as the product over i < k of (n - c - i) / (n - i), whose factors
    are all within [0, 1].

    Args:
        right: c, how many of a problem's n responses are solved, (P,).
        n: responses of each problem.
        k: 1..n.

    Returns:
        (P,)

    Raises:
        ValueError: k is out of its range.
    """
    _check_k(n, k)
    wrong, i = n - np.asarray(right)[:, None], np.arange(k)
    return 1.0 - (np.maximum(wrong - i, 0) / (n - i)).prod(axis=1)


def majority_at_k(answers: Sequence[Hashable | None], is_solved: Sequence[bool], k: int) -> float:
    """maj@k of one problem: how right the most frequent answer among k responses is.

    The expectation over all subsets of k of the n responses, drawn without replacement; for k = n the vote itself.
    The unweighted vote of arXiv 2203.11171, called maj1@k in arXiv 2206.14858. Neither says what a tie is worth: here
    tied answers share it equally. A response without an answer takes part in no vote; where none has one, the value is
    0. An answer's worth is the share of its responses that are solved: 0 or 1, where the judge gives equal answers
    equal scores.

    Exact, by counting: for each number of votes t, every subset whose top answers have t votes each is counted by its
    size v and its number of tops s, one answer after another. C(c, u) ways give an answer with c responses u votes:

        ways[v, s]  = number of such choices of responses without other answers
        worth[v, s] = sum of the tops' worth over these choices

    and the value is sum over t, s of worth[k, s] / s, divided by C(n, k).

    Args:
        answers: (n,); equal when they are the same answer. None: no answer.
        is_solved: (n,)
        k: 1..n. n up to 1000: beyond, C(n, k) is no float any more.

    Raises:
        ValueError: k is out of its range, or the lengths differ.
    """
    n = len(answers)
    _check_k(n, k)
    groups: dict[Hashable, list[bool]] = {}
    silent = 0
    for answer, right in zip(answers, is_solved, strict=True):
        if answer is None:
            silent += 1
        else:
            groups.setdefault(answer, []).append(bool(right))
    counted = [(len(rights), sum(rights) / len(rights)) for rights in groups.values()]
    if not any(worth for _, worth in counted):
        return 0.0
    if k == n:
        top = max(count for count, _ in counted)
        tops = [worth for count, worth in counted if count == top]
        return sum(tops) / len(tops)
    most = min(k, max(count for count, _ in counted))
    total = sum(_worth_with_top(t, counted, silent, k) for t in range(1, most + 1))
    return total / math.comb(n, k)


def _worth_with_top(t: int, counted: Sequence[tuple[int, float]], silent: int, k: int) -> float:
    """Sum, over the subsets of k responses whose top answers have exactly t votes, of the mean worth of the tops."""
    ways = np.zeros((k + 1, k // t + 1))
    worth = np.zeros_like(ways)
    ways[: min(silent, k) + 1, 0] = [math.comb(silent, v) for v in range(min(silent, k) + 1)]
    for count, right in counted:
        new_ways, new_worth = np.zeros_like(ways), np.zeros_like(ways)
        for u in range(min(count, t - 1) + 1):
            choices = math.comb(count, u)
            new_ways[u:] += choices * ways[: k + 1 - u]
            new_worth[u:] += choices * worth[: k + 1 - u]
        if count >= t:
            choices = math.comb(count, t)
            new_ways[t:, 1:] += choices * ways[: k + 1 - t, :-1]
            new_worth[t:, 1:] += choices * (worth[: k + 1 - t, :-1] + right * ways[: k + 1 - t, :-1])
        ways, worth = new_ways, new_worth
    return float((worth[k, 1:] / np.arange(1, k // t + 1)).sum())


def resampled_means(values: np.ndarray, seed: int | Sequence[int], resamples: int = RESAMPLES) -> np.ndarray:
    """Means over problems, of problems drawn with replacement as many times as there are problems.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), Ch. 6.

    Args:
        values: one value for each problem, (P,) or (P, S) for S statistics that share the draws.
        seed: same seed and P, same draws. Samples of different problems need different seeds.

    Returns:
        (resamples,) or (resamples, S)
    """
    values = np.asarray(values, dtype=float)
    rng, count = np.random.default_rng(seed), len(values)
    sizes = [min(_ROWS, resamples - start) for start in range(0, resamples, _ROWS)]
    return np.concatenate([values[rng.integers(count, size=(size, count))].mean(axis=1) for size in sizes])


def interval(means: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval (Efron and Tibshirani, Ch. 13) of resampled means, (resamples,) -> (low, high).

    It covers which problems happen to be in the benchmark, and that each was asked only n times: both are in the spread
    of the problems' values. It does not cover another training seed, another prompt or sampling temperature, or errors
    of the judge. With 30 problems it is wide (up to some 18 points each way) and still a little too narrow: 95 % means
    about 93 %. Where all problems have the same value it has no width, which is not certainty.
    """
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; with {n} responses it must be within 1..{n}")

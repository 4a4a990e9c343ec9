"""The estimators of the tables: avg@k, pass@k, maj@k, and bootstrap intervals over problems. Only numpy is needed.

Each of P problems was asked n times. Each response has a score, which may be any number. A response is *solved* if its
score is at least 1. avg@n is the mean score of a problem ("accuracy is averaged over 32 runs", Table 1). The value of a
benchmark is the mean over its problems.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

SOLVED = 1.0
RESAMPLES = 10_000
LEVEL = 0.95
_ROWS = 500  # Resamples that are made at a time, so that they need only some MB.

Estimate = dict[str, float]  # The keys are value, low and high.


def solved(scores: np.ndarray) -> np.ndarray:
    """Whether each response is solved. The result has the shape of `scores`."""
    return np.asarray(scores, dtype=float) >= SOLVED


def pass_at_k(right: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased estimate of the probability that at least one of k responses is solved: 1 - C(n - c, k) / C(n, k).

    This is Eq. 1 of arXiv 2107.03374. The fraction is computed as the product over i < k of (n - c - i) / (n - i). All
    its factors are within [0, 1].

    Args:
        right: c, the number of solved responses of each problem, shape (P,).
        n: Number of responses of each problem.
        k: A number within 1..n.

    Returns:
        One estimate for each problem, shape (P,).

    Raises:
        ValueError: k is out of its range.
    """
    _check_k(n, k)
    wrong, i = n - np.asarray(right)[:, None], np.arange(k)
    return 1.0 - (np.maximum(wrong - i, 0) / (n - i)).prod(axis=1)


def majority_at_k(answers: Sequence[Hashable | None], is_solved: Sequence[bool], k: int) -> float:
    """maj@k of one problem: the expected worth of the most frequent answer among k responses.

    It is the unweighted vote of arXiv 2203.11171, called maj1@k in arXiv 2206.14858, averaged over all subsets of k of
    the n responses. For k = n it is the vote itself. The worth of an answer is the share of its responses that are
    solved. It is 0 or 1 if the judge gives equal answers equal scores. The papers do not define the worth of a tie;
    here it is the mean worth of the tied answers. A response without an answer does not vote. A vote without any answer
    is worth 0.

    The value is exact. For each number of votes t, it counts the subsets whose top answers have t votes each, by their
    size v and by the number s of top answers. It adds one answer after another. There are C(c, u) ways to give u votes
    to an answer with c responses:

        ways[v, s]  = number of ways to choose v responses such that s answers have t votes and none has more
        worth[v, s] = sum of the worth of the top answers over these ways

    The value is the sum over t and s of worth[k, s] / s, divided by C(n, k).

    Args:
        answers: One answer for each response, shape (n,). None means that the response has no answer.
        is_solved: Whether each response is solved, shape (n,).
        k: A number within 1..n. n may be up to 1000 because C(n, k) must fit into a float.

    Raises:
        ValueError: k is out of its range, or the lengths differ.
    """
    n = len(answers)
    _check_k(n, k)
    by_answer: dict[Hashable, list[bool]] = {}
    for answer, right in zip(answers, is_solved, strict=True):
        by_answer.setdefault(answer, []).append(bool(right))
    silent = len(by_answer.pop(None, []))
    counted = [(len(rights), sum(rights) / len(rights)) for rights in by_answer.values()]
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
    """Sum of the mean worth of the top answers, over all subsets of k responses whose top answers have t votes."""
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
    """Bootstrap means: each is the mean over P problems that are drawn with replacement.

    See Efron and Tibshirani, An Introduction to the Bootstrap (1993), Ch. 6.

    Args:
        values: One value for each problem, shape (P,), or (P, S) for S statistics that share the draws.
        seed: The same seed and P give the same draws. Samples of different problems need different seeds.
        resamples: Number of means.

    Returns:
        The means, shape (resamples,) or (resamples, S).
    """
    values = np.asarray(values, dtype=float)
    rng, count = np.random.default_rng(seed), len(values)
    sizes = [min(_ROWS, resamples - start) for start in range(0, resamples, _ROWS)]
    return np.concatenate([values[rng.integers(count, size=(size, count))].mean(axis=1) for size in sizes])


def interval(means: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval (low, high) of resampled means of shape (resamples,) (Efron and Tibshirani, Ch. 13).

    The interval covers two kinds of chance: which problems are in the benchmark, and that each was asked only n times.
    It does not cover another training seed, another prompt, another sampling temperature, or errors of the judge. With
    30 problems it is wide (up to about 18 points on each side) and still a little too narrow: a 95 % interval covers
    about 93 %. If all problems have the same value, the interval has no width. That does not mean certainty.
    """
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def estimate(value: float, means: np.ndarray) -> Estimate:
    """A value with the interval of its resampled means."""
    low, high = interval(means)
    return {"value": float(value), "low": low, "high": high}


def with_interval(found: Estimate | None, signed: bool = False) -> str:
    """A value and its interval as text with two decimals; "-" for None."""
    if found is None:
        return "-"
    sign = "+" if signed else ""
    return f"{found['value']:{sign}.2f} [{found['low']:{sign}.2f}, {found['high']:{sign}.2f}]"


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; with {n} responses it must be within 1..{n}")

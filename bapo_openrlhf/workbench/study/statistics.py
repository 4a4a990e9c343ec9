"""What few seeds can tell: means and ratios with intervals, aggregates over benchmarks, and paired tests. Pure.

A run is a seed of an arm; scores are (runs, benchmarks). IQM, performance profile and probability of improvement are
those of Agarwal et al., Deep RL at the Edge of the Statistical Precipice (2021, arXiv 2108.13264), with one deviation:
there every run plays one game, and the bootstrap draws runs within each game on its own. Here a run has a score on
every benchmark, and these rise and fall together; so runs are drawn whole. Each benchmark still has as many scores in
each resample as there are runs: the strata stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2000
MAX_EXACT = 16  # pairs up to which all sign flips are counted; beyond, so many are drawn
DRAWN_FLIPS = 99_999


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; low and high are None where one run says nothing of the spread."""

    value: float
    low: float | None
    high: float | None
    count: int


def mean_interval(values: Sequence[float]) -> Estimate | None:
    """Mean with Student's interval: mean +- t(n - 1) s / sqrt(n). None without a value.

    Exact for normal values, and close for means of many questions, as accuracies are. With 5 runs a bootstrap interval
    would cover some 84 % instead of 95 %. Where all values are the same it has no width.
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


def ratio_interval(ratios: Sequence[float]) -> Estimate | None:
    """Geometric mean with the interval of `mean_interval` on the logarithms: a doubling weighs as much as a halving.

    Args:
        ratios: above 0.
    """
    logs = mean_interval(np.log(np.asarray(ratios, dtype=float)))
    if logs is None:
        return None
    low, high = (None if end is None else float(np.exp(end)) for end in (logs.low, logs.high))
    return Estimate(float(np.exp(logs.value)), low, high, logs.count)


# ── aggregates over runs and benchmarks ──


def iqm(scores: np.ndarray) -> float:
    """Interquartile mean: the mean without the lowest and the highest quarter of all scores, rounded down in number."""
    return float(stats.trim_mean(np.asarray(scores, dtype=float), 0.25, axis=None))


def iqm_interval(scores: np.ndarray, seed: int = 0) -> Estimate:
    """IQM over runs and benchmarks, with a bootstrap interval over runs.

    Args:
        scores: (runs, benchmarks)
    """
    scores = np.asarray(scores, dtype=float)
    return _bootstrapped(iqm(scores), [scores], lambda drawn: _flat_trimmed(drawn[0]), seed)


def profile(scores: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Performance profile: the share of all scores that are above each of the values `at`.

    Args:
        scores: (runs, benchmarks)
        at: (points,)

    Returns:
        (points,)
    """
    return (np.asarray(scores, dtype=float).ravel()[:, None] > np.asarray(at, dtype=float)).mean(axis=0)


def improvement(ours: np.ndarray, theirs: np.ndarray, seed: int = 0) -> Estimate:
    """Probability that a run of ours scores higher than one of theirs, a tie counting half, averaged over benchmarks.

    That of one benchmark is the Mann-Whitney U statistic over the number of pairs. Bootstrap interval: runs of both
    sides are drawn independently.

    Args:
        ours: (runs, benchmarks)
        theirs: (other runs, benchmarks)
    """
    ours, theirs = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    value = float(_improvements([ours[None], theirs[None]])[0])
    return _bootstrapped(value, [ours, theirs], _improvements, seed)


def _bootstrapped(
    value: float, samples: Sequence[np.ndarray], statistic: Callable[[list[np.ndarray]], np.ndarray], seed: int
) -> Estimate:
    """Percentile interval of a statistic of resampled runs.

    Args:
        samples: (runs, benchmarks) each.
        statistic: of resamples, (resamples, runs, benchmarks) each -> (resamples,)
    """
    count = min(map(len, samples))
    if count < 2:
        return Estimate(value, None, None, count)
    rng = np.random.default_rng(seed)
    drawn = [sample[rng.integers(len(sample), size=(RESAMPLES, len(sample)))] for sample in samples]
    low, high = np.quantile(statistic(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), count)


def _flat_trimmed(drawn: np.ndarray) -> np.ndarray:
    return stats.trim_mean(drawn.reshape(len(drawn), -1), 0.25, axis=1)


def _improvements(drawn: list[np.ndarray]) -> np.ndarray:
    ours, theirs = drawn[0][:, :, None], drawn[1][:, None]  # (resamples, runs, other runs, benchmarks) together
    return ((ours > theirs) + 0.5 * (ours == theirs)).mean(axis=(1, 2, 3))


# ── paired tests ──


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of paired differences by flipping their signs. None without a pair.

    Under the hypothesis that both arms of a pair are alike, each difference could as well have the other sign; p is
    the share of all 2^n flips whose mean is at least as far from 0 as the measured one (Fisher's randomisation test).
    Up to MAX_EXACT pairs all are counted.
    """
    found = np.asarray(differences, dtype=float)
    if not len(found):
        return None
    if len(found) == 1 or not found.any():
        return 1.0
    test = stats.permutation_test(
        (found,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=np.inf if len(found) <= MAX_EXACT else DRAWN_FLIPS, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(test.pvalue)


def smallest_p(pairs: int) -> float:
    """The least that `sign_flip_p` can be: only the flips that leave, or turn, all signs are as extreme. 2 / 2^n."""
    return min(1.0, 2.0 ** (1 - pairs))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for as many tests as there are (1979): of the ascending p, the k-th (from 0) times m - k.

    Each is at least the one before it, and at most 1. Comparing these with alpha keeps the chance of any false
    rejection at alpha, whatever the tests' dependence.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, dtype=float)[order] * (len(order) - np.arange(len(order)))
    result = np.empty(len(order))
    result[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return result.tolist()

"""Metrics of a batch for the log: what it is made of, how old it is, the terms of Theorem 3.2, and its tokens.

`SourceTokens` and `first_update` are about the tokens of each source before the first update of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bapo_openrlhf.adapt.advantage import relative_rewards
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.schedule import sync_age
from bapo_openrlhf.adapt.shift import Gap, TokenSums, on_policy, shift
from bapo_openrlhf.adapt.theory import LOG_RATIO_CAP, bound_term, importance_summary, sampled_tv
from bapo_openrlhf.adapt.vocabulary import SOURCES


def composition(batch: Batch, capacity: int, attempts: int) -> dict[str, float]:
    """How full the batch is, why groups were filtered, and lengths. `attempts` are hard prompts that gave a group."""
    silent = batch.silent
    right_count = sum(group.mean >= 1 for group in silent)
    lengths = {
        source: [len(response.log_probs) for group in getattr(batch, source) for response in group.responses]
        for source in SOURCES
    }
    metrics: dict[str, float] = {
        "groups/capacity_used": batch.samples / capacity,
        "filtered/none_right": len(silent) - right_count,
        "filtered/all_right": right_count,
        "filtered/by_draw": len(batch.filtered) - len(silent),
        "tokens/trained": sum(map(sum, lengths.values())),
    }
    if attempts:
        metrics["reevaluation/improved_share"] = len(batch.reevaluated) / attempts
    return metrics | {f"length/{source}": float(np.mean(tokens)) for source, tokens in lengths.items() if tokens}


def replay_ages(batch: Batch, step: int, delay: int, uses: Sequence[int]) -> dict[str, float]:
    """Age of the replayed groups in trainer steps and in weight syncs, and in how many earlier steps each was used.

    `delay` is v, the steps between two syncs. If the responses of a group are from several steps, its age is that of
    the oldest one. A stored response in a group of this step is not counted here, but by its method.
    """
    metrics: dict[str, float] = {}
    if batch.replayed:
        steps = [step - group.step for group in batch.replayed]
        syncs = [sync_age(group.weights_version, step, delay) for group in batch.replayed]
        for unit, ages in (("steps", steps), ("syncs", syncs)):
            metrics[f"staleness/replayed_{unit}_mean"] = float(np.mean(ages))
            metrics[f"staleness/replayed_{unit}_max"] = max(ages)
        metrics["staleness/replayed_uses_mean"] = float(np.mean(uses))
    return metrics


def off_policy(
    batch: Batch, log_ratios: np.ndarray, constants: tuple[float, float, float], eps: float
) -> dict[str, float]:
    """Distance to today's policy by source, and the terms of Theorem 3.2, before the step's first update.

    The bound is the sum of the sources' terms, each weighted by its share of the responses. In a group whose responses
    several policies generated, the log-ratio of each response is that to its own policy, and the source is the group's.

    Args:
        log_ratios: log pi_today(y|x) - log alpha(y|x), shape (N,), in the order of `Batch.with_sources`.
        constants: K1, K2 and K3 (Eq. 11-13).
        eps: Smoothing of the variance in Eq. 2.
    """
    metrics = {f"theory/k{number}": constant for number, constant in enumerate(constants, 1)}
    start, bound = 0, 0.0
    # The last constant is that of groups with a prefix: any of them may have a signal, as fresh groups.
    for source, constant in zip(SOURCES, (*constants, constants[0]), strict=True):
        groups = getattr(batch, source)
        if not groups:
            continue
        advantages = np.concatenate([  # A_alpha(x, y) of Eq. 23: Eq. 2
            relative_rewards("group_norm", np.array(group.rewards, float), np.array(group.baseline, float), eps)
            for group in groups
        ])  # fmt: skip
        log_ratio = log_ratios[start : start + len(advantages)]
        start += len(advantages)
        tv = sampled_tv(log_ratio)
        surrogate = float(np.mean(np.exp(np.minimum(log_ratio, LOG_RATIO_CAP)) * advantages))
        metrics[f"tv/{source}"] = tv
        metrics |= {f"importance/{source}_{name}": value for name, value in importance_summary(log_ratio).items()}
        metrics[f"theory/bound_{source}"] = bound_term(surrogate, constant, tv)
        bound += len(advantages) / batch.responses * metrics[f"theory/bound_{source}"]
    if len(batch):
        metrics["theory/bound"] = bound
    return metrics


def shifts(batch: Batch, sums: TokenSums, since: int, gap: Gap) -> dict[str, float]:
    """Shift and KL of today's policy by source, before the first update. `sums` are in the order of `with_sources`."""
    metrics, start = {}, 0
    for source in SOURCES:
        from_current = on_policy(getattr(batch, source), since)
        source_sums, start = sums.at(slice(start, start + len(from_current))), start + len(from_current)
        if len(from_current):
            metrics[f"shift/{source}"] = shift(source_sums, from_current, gap)
            metrics[f"kl/{source}"] = float(source_sums.k3.sum() / max(source_sums.tokens.sum(), 1))
    return metrics


@dataclass(frozen=True)
class Clip:
    """PPO clips a ratio rho to [1 - low, 1 + high]. With a negative advantage, dual clip limits it to `dual` too."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True)
class SourceTokens:
    """The N generated tokens of one source, all responses in one row. Shape (N,) each.

    `log_ratios` are log rho: log-probs of the policy that the step starts from minus the loss's old ones. `advantages`
    are as the loss takes them. `value_errors` are value minus return, and None without a critic.
    """

    log_ratios: np.ndarray
    advantages: np.ndarray
    value_errors: np.ndarray | None = None


def clipped(log_ratios: np.ndarray, advantages: np.ndarray, clip: Clip) -> np.ndarray:
    """Which tokens get no gradient because their ratio is clipped, bool of shape (N,).

    -min(rho A, clip(rho) A) is constant in rho if A > 0 and rho > 1 + high, or if A < 0 and rho < 1 - low. If A < 0,
    dual clip (arXiv 1912.09729) bounds it by -c A, so it is also constant if rho > c.
    """
    ratios = np.exp(np.minimum(log_ratios, LOG_RATIO_CAP))
    without_gradient = ((advantages > 0) & (ratios > 1 + clip.high)) | ((advantages < 0) & (ratios < 1 - clip.low))
    if clip.dual is not None:
        without_gradient |= (advantages < 0) & (ratios > clip.dual)
    return np.asarray(without_gradient)


def first_update(tokens: Mapping[str, SourceTokens], clip: Clip) -> dict[str, float]:
    """Share of clipped tokens, mean |A|, and the critic's error (root mean square) and bias (mean), by source."""
    metrics: dict[str, float] = {}
    for source, of_source in tokens.items():
        if not of_source.advantages.size:
            continue
        metrics[f"clip/{source}"] = float(clipped(of_source.log_ratios, of_source.advantages, clip).mean())
        metrics[f"advantage/{source}_abs"] = float(np.abs(of_source.advantages).mean(dtype=np.float64))
        if of_source.value_errors is not None:
            errors = of_source.value_errors.astype(np.float64)
            metrics[f"value/{source}_error"] = float(np.sqrt(np.mean(errors**2)))
            metrics[f"value/{source}_bias"] = float(errors.mean())
    return metrics

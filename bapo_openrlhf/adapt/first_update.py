"""The tokens of each source before the first update of a step: clipped share, advantages, errors of the critic."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bapo_openrlhf.adapt.staleness import LOG_RATIO_CAP


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

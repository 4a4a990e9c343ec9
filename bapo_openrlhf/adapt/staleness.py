"""How far the policy that generated a group is from today's: in weight syncs, importance ratios and TV distance.

A log-ratio is log pi(y|x) - log alpha(y|x) of a whole response, summed over its tokens. pi is today's policy and alpha
the one that generated the response. Log-ratios of groups are one array of shape (N,), group after group, and `sizes`
has the number of responses of each group.
"""

from collections.abc import Sequence

import numpy as np

from bapo_openrlhf.adapt.theory import sampled_tv

LOG_RATIO_CAP = 20.0  # because a response that is e^1000 times as likely today would make a mean infinite


def sync_age(weights_version: int, step: int, delay: int) -> int:
    """Syncs of the rollout engines since the weights of `weights_version`: multiples of v in (weights_version, step].

    It is 0 for groups of the engines' present weights, and for re-evaluated ones since the last sync. `delay` is v.
    """
    return step // delay - weights_version // delay


def importance_summary(log_ratios: np.ndarray) -> dict[str, float]:
    """Mean, maximum and effective sample size of the importance ratios w = pi(y|x) / alpha(y|x) (rho of Eq. 3).

    `mean` and `max` are those of min(w, e^20). `effective_share` is Kish's effective sample size as a share of N,
    (sum w)^2 / (N sum w^2), in [1/N, 1], with w as it is. The log-ratios are finite, of shape (N,), N > 0.
    """
    log_ratios = np.asarray(log_ratios, dtype=np.float64)
    ratios = np.exp(np.minimum(log_ratios, LOG_RATIO_CAP))
    relative = np.exp(log_ratios - log_ratios.max())  # the share does not depend on the scale of the ratios
    return {
        "mean": float(ratios.mean()),
        "max": float(ratios.max()),
        "effective_share": float(relative.sum() ** 2 / (relative.size * (relative**2).sum())),
    }


def by_group(numbers: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """The numbers of each group, from one array of shape (N,) with group after group."""
    return np.split(numbers, np.cumsum(sizes)[:-1]) if sizes else []


def group_tv(log_ratios: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Sampled TV(pi(.|x), alpha(.|x)) of each prompt (Eq. 9, 10): the mean over its responses of max(0, 1 - w).

    Shape (groups,), in [0, 1]. It is unbiased. With n responses, its standard deviation is up to 1 / (2 sqrt(n)).
    """
    return np.array([sampled_tv(group) for group in by_group(log_ratios, sizes)])


def nonfinite(log_ratios: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Which groups have a log-ratio that is not finite, bool of shape (groups,)."""
    return np.array([not np.isfinite(group).all() for group in by_group(log_ratios, sizes)], dtype=bool)

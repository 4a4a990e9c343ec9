"""How far the policy that generated a group is from today's: in weight syncs, importance ratios and TV distance.

A log-ratio is log pi(y|x) - log alpha(y|x) of a whole response: today's policy against the one that generated it,
summed over tokens. Log-ratios of groups come in one array, (groups * G,), the responses of a group together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from bapo_openrlhf.adapt.theory import sampled_tv

LOG_RATIO_CAP = 20.0  # a response that is e^1000 times as likely today would make a mean infinite


def sync_age(policy_step: int, step: int, delay: int) -> int:
    """Syncs of the rollout engines since the weights of `policy_step`: multiples of v in (policy_step, step].

    0 for what the engines' present weights generated, and for what was generated again since the last sync.

    Args:
        policy_step: updates behind the weights that generated a group; at most `step`.
        step: today's trainer step.
        delay: v, steps between two syncs.
    """
    return step // delay - policy_step // delay


def importance_summary(log_ratios: np.ndarray) -> dict[str, float]:
    """Mean, maximum and effective sample size of the importance ratios w = pi(y|x) / alpha(y|x) (rho of Eq. 3).

    Args:
        log_ratios: (N,), finite.

    Returns:
        mean, max: of min(w, e^20).
        effective_share: (sum w)^2 / (N sum w^2), Kish's effective sample size as a share of N, in [1/N, 1]; w uncapped.
        All nan for no responses.
    """
    log_ratios = np.asarray(log_ratios, dtype=np.float64)
    if log_ratios.size == 0:
        return {"mean": math.nan, "max": math.nan, "effective_share": math.nan}
    ratios = np.exp(np.minimum(log_ratios, LOG_RATIO_CAP))
    relative = np.exp(log_ratios - log_ratios.max())  # the share is the same for ratios of any scale
    return {
        "mean": float(ratios.mean()),
        "max": float(ratios.max()),
        "effective_share": float(relative.sum() ** 2 / (relative.size * (relative**2).sum())),
    }


def group_tv(log_ratios: np.ndarray, group_size: int, external: np.ndarray | None = None) -> np.ndarray:
    """Sampled TV(pi(.|x), alpha(.|x)) of each prompt (Eq. 9, 10): the mean over its G responses of max(0, 1 - w).

    Unbiased, but from G responses only: its standard deviation is up to 1 / (2 sqrt(G)).

    Args:
        log_ratios: (groups * G,).
        group_size: G.
        external: bool (groups * G,), responses that another model wrote; they are left out. None: there are none.

    Returns:
        (groups,), each in [0, 1]; 0 for a group of which nothing is left.
    """
    own = np.ones(np.size(log_ratios), dtype=bool) if external is None else ~external
    rows = zip(np.reshape(log_ratios, (-1, group_size)), np.reshape(own, (-1, group_size)), strict=True)
    return np.array([sampled_tv(group[kept]) if kept.any() else 0.0 for group, kept in rows])


def beyond(tv: Mapping[int, float], limit: float | None) -> set[int]:
    """Groups that break the theorem's condition: TV distance above delta_1 (X1, Eq. 9) or delta_3 (X3, Eq. 10).

    Args:
        tv: distance of each group, by uid.
        limit: delta; None for no limit.
    """
    return set() if limit is None else {uid for uid, distance in tv.items() if distance > limit}


def nonfinite(log_ratios: np.ndarray, group_size: int) -> np.ndarray:
    """Which groups have a log-ratio that is no finite number; bool (groups,).

    Args:
        log_ratios: (groups * G,).
        group_size: G.
    """
    return np.asarray(~np.isfinite(np.reshape(log_ratios, (-1, group_size))).all(axis=1))

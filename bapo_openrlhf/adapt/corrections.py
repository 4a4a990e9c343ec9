"""Corrections for stale responses: which tokens stay in the loss, and how large a step the actor takes."""

import math
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.staleness import importance_summary


def second_moment_mask(log_ratios: np.ndarray, advantages: np.ndarray, limit: float) -> np.ndarray:
    """Which tokens stay in the loss by M2PO (arXiv 2510.01161), for arrays of shape (N,).

    Only a token counts whose ratio pi / alpha is on the side that PPO's clip is about: A > 0 and pi > alpha, or A < 0
    and pi < alpha. Of these tokens, those with the largest (log pi - log alpha)^2 are left out, one after another,
    until the mean of this square over the others is at most `limit`, 0.04 in the paper. All other tokens stay.
    """
    stays = np.ones(len(log_ratios), dtype=bool)
    counted = np.flatnonzero(log_ratios * np.sign(advantages) > 0)
    counted = counted[np.argsort(np.abs(log_ratios[counted]), kind="stable")]
    means = np.cumsum(log_ratios[counted] ** 2) / np.arange(1, len(counted) + 1)  # they never fall
    stays[counted[np.searchsorted(means, limit, side="right") :]] = False
    return stays


def vetoed(log_ratios: Any, advantages: Any, generated: Any, limit: float) -> Any:
    """Which tokens leave the loss by the veto of mu-GRPO (arXiv 2605.17570), for arrays and tensors of shape (B, A).

    A token trips the veto if its advantage is negative and its ratio pi / alpha is below `limit`, which is 1e-4 in the
    authors' example. The first one that does stays, because its ratio makes its gradient tiny. The tokens after it
    leave, because today's policy would hardly come to where they stand. If a response has positive advantages too, such
    tokens neither trip nor leave. Only `generated` tokens count.
    """
    negative = generated & (advantages < 0)
    tripped = negative & (log_ratios < math.log(limit))
    return negative & (tripped.cumsum(-1) > tripped)


def learning_rate_factor(log_ratios: np.ndarray, full: int) -> float:
    """Factor on the actor's learning rate: the root of the effective sample size, as a share of a full batch.

    It is sqrt((sum w)^2 / (F sum w^2)) with w = pi(y|x) / alpha(y|x), in [1 / sqrt(F), 1]. For a full batch it is the
    factor of VCPO (arXiv 2602.17616), so a batch in which a few responses outweigh the others makes a smaller step.
    Here, so does a batch that has few responses, because Adam's steps are as long for noise as for a signal.
    `log_ratios` are log w of N responses, shape (N,), and `full` is F >= N, what full optimizer steps would hold.
    """
    return math.sqrt(importance_summary(log_ratios)["effective_share"] * len(log_ratios) / full)

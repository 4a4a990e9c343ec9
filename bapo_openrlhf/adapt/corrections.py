"""Corrections for stale responses: which tokens stay in the loss, and how large a step the actor takes."""

import math

import numpy as np

from bapo_openrlhf.adapt.staleness import importance_summary


def second_moment_mask(log_ratios: np.ndarray, advantages: np.ndarray, limit: float) -> np.ndarray:
    """Which tokens stay in the loss by M2PO (arXiv 2510.01161).

    Only a token counts whose ratio pi / alpha is on the side that PPO's clip is about: A > 0 and pi > alpha, or A < 0
    and pi < alpha. Of these tokens, those with the largest (log pi - log alpha)^2 are left out, one after another,
    until the mean of this square over the others is at most `limit`. All other tokens stay.

    Args:
        log_ratios: log pi - log alpha of each token, shape (N,).
        advantages: A of each token, shape (N,).
        limit: Largest mean square; 0.04 in the paper.

    Returns:
        bool, shape (N,).
    """
    stays = np.ones(len(log_ratios), dtype=bool)
    counted = np.flatnonzero(log_ratios * np.sign(advantages) > 0)
    counted = counted[np.argsort(np.abs(log_ratios[counted]), kind="stable")]
    means = np.cumsum(log_ratios[counted] ** 2) / np.arange(1, len(counted) + 1)  # they never fall
    stays[counted[np.searchsorted(means, limit, side="right") :]] = False
    return stays


def learning_rate_factor(log_ratios: np.ndarray, full: int) -> float:
    """Factor on the actor's learning rate: the root of the effective sample size, as a share of a full batch.

    It is sqrt((sum w)^2 / (F sum w^2)) with w = pi(y|x) / alpha(y|x), in [1 / sqrt(F), 1]. For a full batch it is the
    factor of VCPO (arXiv 2602.17616), so a batch in which a few responses outweigh the others makes a smaller step.
    Here, so does a batch that has few responses, because Adam's steps are as long for noise as for a signal.

    Args:
        log_ratios: log pi(y|x) - log alpha(y|x) of each response, shape (N,), N at least 1.
        full: F, the responses that the batch's optimizer steps would hold if they were full, at least N.
    """
    return math.sqrt(importance_summary(log_ratios)["effective_share"] * len(log_ratios) / full)

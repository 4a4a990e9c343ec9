"""Theorem 3.2 for a batch: the constants K1, K2, K3 (Eq. 11-13), sampled TV distances, the terms of the bound.

Sampled distances and importance ratios are made of log-ratios. The log-ratio of a response is log pi(y|x) -
log alpha(y|x), summed over its tokens. pi is today's policy and alpha the one that generated the response.

The theorem needs every reward in [0, 1] and TV distances that stay small (Eq. 9, 10). Logged at every step, these
numbers show whether its conditions hold during training.
"""

import math

import numpy as np

LOG_RATIO_CAP = 20.0  # because a response that is e^1000 times as likely today would make a mean infinite


def stability_constant(variance: float, eps: float = 1e-6) -> float:
    """K = (1 - sigma) / sigma with sigma = sqrt(variance + eps) (Eq. 36): how much a TV distance costs in the bound.

    `variance` is a lower bound of the reward variance in a source, in [0, 1/4] for rewards in [0, 1].
    """
    sigma = math.sqrt(variance + eps)
    return (1 - sigma) / sigma


def k1(group_size: int, eps: float = 1e-6) -> float:
    """K1 of X1 (Eq. 11). The least variance of an informative group of G 0/1 rewards is (G - 1) / G^2."""
    return stability_constant((group_size - 1) / group_size**2, eps)


def k2(c1: float, eps: float = 1e-6) -> float:
    """K2 of X2 (Eq. 12), from the variance c1 (1 - c1)."""
    return stability_constant(c1 * (1 - c1), eps)


def k3(c2: float, c3: float, eps: float = 1e-6) -> float:
    """K3 of X3 (Eq. 13), from the variance min(c2 (1 - c2), c3 (1 - c3))."""
    return stability_constant(min(c2 * (1 - c2), c3 * (1 - c3)), eps)


def sampled_tv(log_ratios: np.ndarray) -> float:
    """Sampled TV(pi(.|x), alpha(.|x)) over whole responses (Eq. 9, 10), in [0, 1].

    TV = E_{y ~ alpha} max(0, 1 - pi(y|x) / alpha(y|x)). The estimate is unbiased, and bounded for any ratio. It is the
    mean over N responses drawn from alpha, from their log-ratios, shape (N,), N > 0. Its standard deviation is up to
    1 / (2 sqrt(N)).
    """
    log_ratios = np.asarray(log_ratios, dtype=np.float64)
    return float(np.mean(-np.expm1(np.minimum(log_ratios, 0.0))))


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


def bound_term(surrogate: float, k: float, tv: float) -> float:
    """One source's term L_i of the lower bound at pi_theta = pi_theta_t, the policy that the step starts from.

    L_i = L_alpha(pi_theta) - 2 K_i TV(pi_theta, alpha_i) - 2 TV(pi_theta_t, alpha_i), where both distances are `tv`.
    `surrogate` is the sampled L_alpha(pi_theta_t) = E_{y ~ alpha}[pi_theta_t(y|x) / alpha(y|x) A_alpha(x, y)]
    (Eq. 22, 23).
    """
    return surrogate - 2 * k * tv - 2 * tv

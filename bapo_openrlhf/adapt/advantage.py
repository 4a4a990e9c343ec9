"""Group-relative advantages (Eq. 2)."""

import numpy as np


def group_relative_advantages(rewards: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Eq. 2: A_i = (r_i - mean(r)) / sqrt(var(r) + eps), within each group.

    var is the population variance (divided by G), because sigma in the theorem (Eq. 37) is the population standard
    deviation. OpenRLHF's own `group_norm` divides by the sample standard deviation + 1e-9. The two differ by the factor
    sqrt((G - 1) / G).

    Args:
        rewards: Rewards of the responses, shape (groups, G).
        eps: Smoothing of the variance.

    Returns:
        Advantages, float64 of shape (groups, G). A group of equal rewards has zeros.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    # Rounding of the mean would otherwise give equal rewards a tiny advantage.
    equal = (rewards == rewards[..., :1]).all(axis=-1, keepdims=True)
    centred = np.where(equal, 0.0, rewards - rewards.mean(axis=-1, keepdims=True))
    variance = (centred**2).mean(axis=-1, keepdims=True)
    advantages: np.ndarray = centred / np.sqrt(variance + eps)
    return advantages

"""Group-relative advantages: Eq. 2, and those of OpenRLHF's other estimators."""

import numpy as np

from bapo_openrlhf.adapt.rewards import without_rounding

GROUP_ESTIMATORS = ("group_norm", "dr_grpo", "rloo", "reinforce_baseline")  # advantages relative to those of the group


def group_relative_advantages(rewards: np.ndarray, baseline: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Eq. 2: A_i = (r_i - mean(b)) / sqrt(var(b) + eps), within one group.

    var is the population variance (divided by G), because sigma in the theorem (Eq. 37) is the population standard
    deviation. OpenRLHF's own `group_norm` divides by the sample standard deviation + 1e-9. The two differ by the factor
    sqrt((G - 1) / G).

    Args:
        rewards: Rewards r of the responses that are trained on, shape (n,).
        baseline: Rewards b that they are compared with, shape (G,): those of the responses that the group was generated
            with, or r itself (`Group.relative_to`).
        eps: Smoothing of the variance.

    Returns:
        Advantages, float64 of shape (n,). In a group of equal rewards they are 0. Rewards that differ only by rounding
        are equal (`rewards.without_rounding`).
    """
    rewards, baseline = _without_rounding(rewards, baseline)
    # Rounding of the mean would otherwise give equal rewards a tiny advantage.
    mean = baseline[0] if (baseline == baseline[0]).all() else baseline.mean()
    advantages: np.ndarray = (rewards - mean) / np.sqrt(((baseline - mean) ** 2).mean() + eps)
    return advantages


def relative_rewards(estimator: str, rewards: np.ndarray, baseline: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """What an estimator makes of the rewards of one group: its advantages, before the KL penalty and any whitening.

    Args:
        estimator: group_norm is Eq. 2. rloo subtracts the mean of the other rewards of the baseline, dr_grpo and
            reinforce_baseline the mean of all, and gae nothing.
        rewards, baseline, eps: See `group_relative_advantages`. For rloo, the baseline contains the rewards.

    Returns:
        float64 of shape (n,).

    Raises:
        ValueError: The estimator has another name.
    """
    rewards, baseline = _without_rounding(rewards, baseline)
    match estimator:
        case "group_norm":
            return group_relative_advantages(rewards, baseline, eps)
        case "rloo":
            return rewards - (baseline.sum() - rewards) / (len(baseline) - 1) if len(baseline) > 1 else 0 * rewards
        case "dr_grpo" | "reinforce_baseline":
            return np.asarray(rewards - baseline.mean())
        case "gae":
            return rewards
    raise ValueError(f"estimator is {estimator!r}; it must be group_norm, rloo, dr_grpo, reinforce_baseline or gae")


def _without_rounding(rewards: np.ndarray, baseline: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both, so that rewards which differ only by rounding are equal."""
    count = len(rewards)
    both = np.array(without_rounding([*rewards, *baseline]), dtype=np.float64)
    return both[:count], both[count:]

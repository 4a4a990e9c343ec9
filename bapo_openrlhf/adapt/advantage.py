"""From the rewards of a group to advantages: Eq. 2, and OpenRLHF's other estimators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bapo_openrlhf.adapt.rewards import without_rounding


@dataclass(frozen=True)
class Estimator:
    """One of OpenRLHF's `--algo.advantage.estimator`, for a batch of groups.

    Attributes:
        formula: What a reward r becomes, in words. b are the rewards that it is compared with (`Group.relative_to`).
        relative: Takes r and b, without rounding, and eps, and returns what r becomes.
        whitened, critic: Whether advantages are whitened over the batch, and made of a critic's values.
    """

    formula: str
    relative: Callable[[np.ndarray, np.ndarray, float], np.ndarray]
    whitened: bool = False
    critic: bool = False


def _standardised(rewards: np.ndarray, baseline: np.ndarray, eps: float) -> np.ndarray:
    """Eq. 2: A_i = (r_i - mean(b)) / sqrt(var(b) + eps), within one group. 0 if all b are equal.

    var is the population variance (divided by G), because sigma in the theorem (Eq. 37) is the population standard
    deviation. OpenRLHF's own `group_norm` divides by the sample standard deviation + 1e-9. The two differ by the factor
    sqrt((G - 1) / G).
    """
    # Rounding of the mean would otherwise give equal rewards a tiny advantage, divided by a tiny deviation.
    mean = baseline[0] if (baseline == baseline[0]).all() else baseline.mean()
    advantages: np.ndarray = (rewards - mean) / np.sqrt(((baseline - mean) ** 2).mean() + eps)
    return advantages


def _less_the_mean(rewards: np.ndarray, baseline: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(rewards - baseline.mean())


def _less_the_others(rewards: np.ndarray, baseline: np.ndarray, eps: float) -> np.ndarray:
    return rewards - (baseline.sum() - rewards) / (len(baseline) - 1) if len(baseline) > 1 else 0 * rewards


ESTIMATORS = {
    "gae": Estimator("r", lambda rewards, baseline, eps: rewards, whitened=True, critic=True),
    "group_norm": Estimator("(r - mean b) / sqrt(var b + eps), Eq. 2", _standardised),
    "dr_grpo": Estimator("r - mean b", _less_the_mean),
    "rloo": Estimator("r - mean of the others of b", _less_the_others),
    "reinforce_baseline": Estimator("r - mean b", _less_the_mean, whitened=True),
}
GROUP_ESTIMATORS = tuple(name for name, estimator in ESTIMATORS.items() if not estimator.critic)  # the default first


def relative_rewards(
    estimator: str,
    rewards: np.ndarray,
    baseline: np.ndarray,
    eps: float = 1e-6,
    ends: Sequence[float] = (0.0, 1.0),
) -> np.ndarray:
    """What an estimator makes of the rewards of one group: its advantages, before the KL penalty and any whitening.

    Rewards that differ only by rounding are equal (`rewards.without_rounding`). An estimator that is not in ESTIMATORS
    is a ValueError.

    Args:
        rewards: Rewards r of the responses that are trained on, shape (n,).
        baseline: Rewards b that they are compared with, shape (G,), or r itself (`Group.relative_to`). For rloo, they
            contain the rewards.
        ends: The least and the greatest reward of the task.

    Returns:
        float64 of shape (n,).
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; it must be one of {', '.join(ESTIMATORS)}")
    both = np.array(without_rounding([*rewards, *baseline], ends), dtype=np.float64)
    return ESTIMATORS[estimator].relative(both[: len(rewards)], both[len(rewards) :], eps)


def length_adaptive_lambda(lengths: np.ndarray, alpha: float) -> np.ndarray:
    """VAPO's lambda of the advantages of responses of l tokens, 1 - 1/(alpha l), shape (B,).

    See arXiv 2504.05118, Sec. 4.2. With it, the weights lambda^i of the errors that follow add up to alpha l in a long
    response. It is negative if l is below 1 / alpha, and 0 is taken then. alpha is 0.05 in the paper.
    """
    return np.asarray(np.maximum(1 - 1 / (alpha * np.maximum(lengths, 1)), 0.0))

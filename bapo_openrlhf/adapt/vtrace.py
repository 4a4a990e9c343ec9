"""V-trace (Espeholt et al. 2018, arXiv 1802.01561): the critic path on responses that an earlier policy generated.

GAE on a replayed response estimates values of the policy that generated it. V-trace weights each token by the truncated
ratio pi / alpha, so that the critic's targets are those of today's policy, or of one close to it.
"""

import numpy as np


def vtrace(
    values: np.ndarray,
    rewards: np.ndarray,
    log_ratios: np.ndarray,
    mask: np.ndarray,
    *,
    gamma: float,
    lambd: float,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace targets (its Eq. 1) and their advantages, for a PPO loss with the ratio pi / alpha.

    With rho_s = min(1, pi / alpha) and delta_s = r_s + gamma V_{s+1} - V_s, V = 0 after the last position:

        v_s = V_s + rho_s (delta_s + gamma lambda (v_{s+1} - V_{s+1}))
        A_s = delta_s + gamma lambda (v_{s+1} - V_{s+1})

    These are its weights with rho_bar = c_bar = 1. A_s does not contain rho_s, because the loss multiplies it by the
    ratio. With lambda = 1 it is the paper's r_s + gamma v_{s+1} - V_s. If all log-ratios are 0, both are GAE(gamma,
    lambda).

    A masked position counts as in OpenRLHF's GAE: its value and reward are 0, and its ratio is 1. If lambda = 1, this
    is Eq. 1 without the positions between two turns, except for their discount.

    The values converge to those of a policy proportional to min(alpha, pi). What a token learns from a later one fades
    on average by 1 - TV(pi, alpha) for each token between them.

    Args:
        values, rewards: V of today's critic and r at each position, shape (rows, A).
        log_ratios: log pi - log alpha of each token, shape (rows, A). It must be 0 for tokens of today's weights.
            Otherwise the rounding difference between engine and actor would end every trace after some hundred tokens.
        mask: Whether a position is a token that the policy generated, shape (rows, A).
        lambd: Lambda of GAE.

    Returns:
        A and v, both float64 of shape (rows, A).
    """
    generated = np.asarray(mask, dtype=bool)
    values, rewards, log_ratios = (
        np.where(generated, np.asarray(numbers, dtype=np.float64), 0.0) for numbers in (values, rewards, log_ratios)
    )
    rho = np.exp(np.minimum(log_ratios, 0.0))  # truncated first, because a large log-ratio would overflow
    delta = rewards + gamma * np.pad(values[:, 1:], ((0, 0), (0, 1))) - values

    advantages, targets = np.empty_like(values), np.empty_like(values)
    correction = np.zeros(len(values))  # v_{s+1} - V_{s+1}
    for s in reversed(range(values.shape[1])):
        advantages[:, s] = delta[:, s] + gamma * lambd * correction
        correction = rho[:, s] * advantages[:, s]
        targets[:, s] = values[:, s] + correction
    return advantages, targets

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
    lambd: float | np.ndarray,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace targets (its Eq. 1) and their advantages, for a PPO loss with the ratio pi / alpha.

    With rho_s = min(rho_max, pi / alpha), c_s = lambda min(c_max, pi / alpha) and
    delta_s = r_s + gamma V_{s+1} - V_s, V = 0 after the last position:

        v_s = V_s + rho_s delta_s + gamma c_s (v_{s+1} - V_{s+1})
        A_s = delta_s + gamma lambda (v_{s+1} - V_{s+1})

    A_s does not contain rho_s, because the loss multiplies it by the ratio. With lambda = 1 it is the paper's r_s +
    gamma v_{s+1} - V_s. If all log-ratios are 0 (and c_max is at least 1), both are GAE(gamma, lambda).

    A masked position counts as in OpenRLHF's GAE: its value and reward are 0, and its ratio is 1. If lambda = 1 and
    rho_max = c_max >= 1, this is Eq. 1 without the positions between two turns, except for their discount.

    rho_max decides what the values converge to: those of a policy proportional to min(rho_max alpha, pi). c_max decides
    how fast they converge and how much the targets vary. With 1, what a token learns from a later one fades on average
    by 1 - TV(pi, alpha) for each token between them.

    Args:
        values, rewards: V of today's critic and r at each position, shape (rows, A).
        log_ratios: log pi - log alpha of each token, shape (rows, A). It must be 0 for tokens of today's weights.
            Otherwise the rounding difference between engine and actor would end every trace after some hundred tokens.
        mask: Whether a position is a token that the policy generated, shape (rows, A).
        lambd: Lambda of GAE: one number, or one of each row, shape (rows,).

    Returns:
        A and v, both float64 of shape (rows, A).

    Raises:
        ValueError: c_max is not above 0, or it is above rho_max.
    """
    if not 0 < c_max <= rho_max:
        raise ValueError(f"c_max is {c_max} and rho_max is {rho_max}; c_max must be above 0 and at most rho_max")
    generated = np.asarray(mask, dtype=bool)
    values, rewards, log_ratios = (
        np.where(generated, np.asarray(numbers, dtype=np.float64), 0.0) for numbers in (values, rewards, log_ratios)
    )
    rho = np.exp(np.minimum(log_ratios, np.log(rho_max)))  # truncated first, because a large log-ratio would overflow
    c = np.expand_dims(lambd, -1) * np.minimum(rho, c_max)
    delta = rewards + gamma * np.pad(values[:, 1:], ((0, 0), (0, 1))) - values

    advantages, targets = np.empty_like(values), np.empty_like(values)
    correction = np.zeros(len(values))  # v_{s+1} - V_{s+1}
    for s in reversed(range(values.shape[1])):
        advantages[:, s] = delta[:, s] + gamma * lambd * correction
        correction = rho[:, s] * delta[:, s] + gamma * c[:, s] * correction
        targets[:, s] = values[:, s] + correction
    return advantages, targets

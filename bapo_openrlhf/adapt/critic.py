"""What the critic learns from: groups beside the batch of the actor, and V-trace; whether it is a good baseline.

The actor needs groups with a signal. The critic does not: that a group is all right or all wrong says most of what its
prompt is worth, and the filter drops just these groups.

In the equations of the baseline (EVPO, arXiv 2604.19485), G are the Monte Carlo returns of tokens. The actor learns
from what a baseline b leaves of them, G - b. A critic that explains nothing adds its own noise to it.
"""

from collections.abc import Iterable

import numpy as np

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group


def beside_batch(generated: Iterable[Group], batch: Batch) -> list[Group]:
    """What this step generated and the actor does not train on: whole groups, and what is left out of others.

    No response is in it twice, or in the batch too. Groups that turned out not to be finite are left out.
    """
    batch_ids = {id(response) for _, group in batch.with_sources() for response in group.responses}
    nonfinite_uids = {group.uid for group in batch.nonfinite}
    groups = []
    for group in generated:
        places = [place for place, response in enumerate(group.responses) if id(response) not in batch_ids]
        if places and group.uid not in nonfinite_uids:
            groups.append(group.keep(places, relative_to="generated"))
    return groups


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float | None:
    """1 - var(G - V) / var(G), over tokens; None if there are none, or if all returns are equal."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.var(returns - values)) / spread if spread else None


def critic_leaves_less(returns: np.ndarray, values: np.ndarray, remainders: np.ndarray) -> bool:
    """Whether var(G - V) < var(G - b) over tokens, with G and V as `returns` and `values`; not if there are none.

    `remainders` are G - b. If b is one number for all tokens, this says that the explained variance is above 0.
    """
    return bool(len(returns) and np.var(returns - values) < np.var(remainders))


def vtrace(
    values: np.ndarray,
    rewards: np.ndarray,
    log_ratios: np.ndarray,
    mask: np.ndarray,
    *,
    gamma: float,
    lambd: float,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561): targets (its Eq. 1) and advantages for responses of any policy.

    GAE on a replayed response estimates values of the policy that generated it. V-trace weights each token by the
    truncated ratio pi / alpha, so that the critic's targets are those of today's policy, or of one close to it. The
    advantages are for a PPO loss with the ratio pi / alpha. With rho_s = min(1, pi / alpha) and
    delta_s = r_s + gamma V_{s+1} - V_s, V = 0 after the last position:

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

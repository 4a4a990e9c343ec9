"""Whether the critic's values are a better baseline than a mean of rewards: EVPO (arXiv 2604.19485).

G are the Monte Carlo returns of tokens. The actor learns from what a baseline b leaves of them, G - b. A critic that
explains nothing adds its own noise to it.
"""

import numpy as np


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float | None:
    """1 - var(G - V) / var(G), over tokens; None if there are none, or if all returns are equal."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.var(returns - values)) / spread if spread else None


def critic_leaves_less(returns: np.ndarray, values: np.ndarray, otherwise: np.ndarray) -> bool:
    """Whether var(G - V) < var(G - b) over tokens, with G and V as `returns` and `values`; not if there are none.

    `otherwise` is G - b. If b is one number for all tokens, this says that the explained variance is above 0.
    """
    return bool(len(returns) and np.var(returns - values) < np.var(otherwise))

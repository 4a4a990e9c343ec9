"""What the critic may learn from in a step beside the batch of the actor, and whether its values are a good baseline.

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

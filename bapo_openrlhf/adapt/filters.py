"""Fresh filters: which freshly generated groups become X1 (Definition 3.1, first term; Appendix A.3).

A filter maps the fresh groups of one step to a mask. True keeps the group.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from bapo_openrlhf.adapt.group import Group

UNIFORM = 0.6  # share of the groups that the uniform filter keeps (A.3)
FreshFilter = Callable[[Sequence[Group], np.random.Generator], list[bool]]


def has_signal(group: Group) -> bool:
    """Whether the group's mean is informative: 1/G <= mu <= (G-1)/G for 0/1 rewards (Eq. 5, first term).

    For other rewards, a mean is informative if the rewards differ at all: variance > 0. With 0/1 rewards, the mean is a
    multiple of 1/G, so 0 < mu < 1 says the same.
    """
    if group.is_binary:
        return 0 < group.mean < 1
    return group.variance > 0


def range_filter(groups: Sequence[Group], rng: np.random.Generator) -> list[bool]:
    """Mode 1 of A.3, the paper's default. It drops the groups that are all right or all wrong."""
    return [has_signal(group) for group in groups]


def gaussian_filter(mean: float = 0.5, std: float = 0.2) -> FreshFilter:
    """Mode 2 of A.3. It keeps a group with probability N(mu | mean, std^2) / N(mean | mean, std^2).

    All-right and all-wrong groups are always dropped, as the proof of Theorem A.2 (step 2) requires.
    """

    def keep(groups: Sequence[Group], rng: np.random.Generator) -> list[bool]:
        draws = rng.random(len(groups))
        weights = [math.exp(-((float(group.mean) - mean) ** 2) / (2 * std**2)) for group in groups]
        return [has_signal(group) and bool(u < w) for group, u, w in zip(groups, draws, weights, strict=True)]

    return keep


def uniform_filter(groups: Sequence[Group], rng: np.random.Generator) -> list[bool]:
    """Mode 3 of A.3. It keeps a random UNIFORM of the groups, rounded to a whole number. Rewards do not matter."""
    count = math.floor(UNIFORM * len(groups) + 0.5)
    kept = set(rng.choice(len(groups), size=count, replace=False).tolist())
    return [index in kept for index in range(len(groups))]


def keep_all(groups: Sequence[Group], rng: np.random.Generator) -> list[bool]:
    """No filter."""
    return [True] * len(groups)


def make_filter(name: str, *, mean: float = 0.5, std: float = 0.2) -> FreshFilter:
    """The fresh filter called `name`: range, gaussian, uniform or none.

    Raises:
        KeyError: There is no filter of this name.
    """
    return {
        "range": range_filter,
        "gaussian": gaussian_filter(mean, std),
        "uniform": uniform_filter,
        "none": keep_all,
    }[name]

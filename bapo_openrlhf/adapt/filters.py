"""Fresh filters: which freshly generated groups become X1 (Definition 3.1, first term; Appendix A.3; RAGEN-2).

A filter maps the fresh groups of one step to a mask. True keeps the group.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.rewards import exact_mean, exact_sum

UNIFORM = 0.6  # share of the groups that the uniform filter keeps (A.3)
FreshFilter = Callable[[Sequence[Group], np.random.Generator], list[bool]]
Between = tuple[Fraction | float, Fraction | float]  # a mean is strictly between these; a float stands for infinity


def informative(rewards: Sequence[Fraction], between: Between | None = None) -> bool:
    """Whether rewards differ, and their mean is strictly `between` two numbers, if any are given (`has_signal`)."""
    if len(set(rewards)) < 2:
        return False
    return between is None or between[0] < exact_mean(rewards) < between[1]


def has_signal(group: Group, between: Between | None = None) -> bool:
    """Whether a group has a signal: its rewards differ, and its mean is strictly between two numbers, if any are given.

    With rewards of 0 and 1 the mean is a multiple of 1/G. Then this is 1/G <= mu <= (G-1)/G (Eq. 5, first term).
    """
    return informative(group.baseline, between)


def range_filter(between: Between | None) -> FreshFilter:
    """Mode 1 of A.3, the paper's default. It drops the groups that are all right or all wrong (see `informative`)."""
    return lambda groups, rng: [has_signal(group, between) for group in groups]


def gaussian_filter(mean: float, std: float) -> FreshFilter:
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
    places = set(rng.choice(len(groups), size=count, replace=False).tolist())
    return [index in places for index in range(len(groups))]


def top_p_filter(share: Fraction) -> FreshFilter:
    """It keeps the fewest groups that together have at least `share` of the summed reward variance (arXiv 2604.06268).

    Of equal variances, of which small groups have many, the lower uid comes first. A group without variance is never
    kept. With a share of 1 this is the range filter.

    Only the paper's first pages and the authors' code (mll-lab-nu/RAGEN, 20daedc) could be read. That code adds up
    standard deviations and not variances, is content with 0.01 less than the share, and keeps no order of equal groups.
    0.9 is what its guide recommends.
    """

    def keep(groups: Sequence[Group], rng: np.random.Generator) -> list[bool]:
        rest = share * exact_sum([group.variance for group in groups])
        uids = set()
        for group in sorted(groups, key=lambda group: (-group.variance, group.uid)):
            if rest <= 0:
                break
            uids.add(group.uid)
            rest -= group.variance
        return [group.uid in uids for group in groups]

    return keep


def keep_all(groups: Sequence[Group], rng: np.random.Generator) -> list[bool]:
    """No filter."""
    return [True] * len(groups)

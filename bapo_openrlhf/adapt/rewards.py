"""Rewards as numbers that can be compared exactly: thresholds as they are written, and rewards without their rounding.

A reward often is the sum of some parts, in float32. Two orders of summing give 1 and 0.99999994, and these are one
reward. So are 0 and 0.3 - 0.1 - 0.2, which is -2.8e-17: rounding has the size of the parts, and not that of their sum.
The parts are not known, so their size is taken as that of the least or greatest reward of the task. If they were two
rewards, their group would seem to have a signal, and its advantages would be noise of full size.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

Range = tuple[Fraction, Fraction]
UNIT: Range = (Fraction(0), Fraction(1))

STEPS = 4  # of float32, by which rewards may differ and still be equal


def as_fraction(value: Fraction | float | str) -> Fraction:
    """Exact value of a threshold as the user wrote it: "1/8", 0.1 and 0.125 become 1/8, 1/10 and 1/8.

    A float is read by its shortest decimal form. A value that is not a finite number is a ValueError.
    """
    if isinstance(value, Fraction):
        return value
    text = str(value).strip()
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{value!r} is not a number or a fraction such as 1/8") from None


def exact_reward(reward: float) -> Fraction:
    """A reward as the number its author meant: 0.1 is one tenth, even after conversion to a float32 tensor and back."""
    reward = float(reward)
    if reward in (0.0, 1.0):
        return Fraction(int(reward))
    with np.errstate(over="ignore"):
        float32 = np.float32(reward)
    return Fraction(str(float32) if float(float32) == reward else repr(reward))


def exact_mean(numbers: Sequence[Fraction]) -> Fraction:
    """Their mean."""
    return exact_sum(numbers) / len(numbers)


def exact_sum(numbers: Sequence[Fraction]) -> Fraction:
    """Their sum. One common denominator is used, because adding them one by one took most of this layer's time."""
    ratios = [number.as_integer_ratio() for number in numbers]
    common = math.lcm(*(denominator for _, denominator in ratios))
    return Fraction(sum(numerator * (common // denominator) for numerator, denominator in ratios), common)


def as_range(ends: Sequence[Fraction | float | str]) -> Range:
    """The least and the greatest reward of a task, exactly. Others than two, the lower one first, are a ValueError."""
    try:
        low, high = map(as_fraction, ends)
    except (TypeError, ValueError):
        low = high = Fraction(0)
    if low >= high:
        raise ValueError("it must be two numbers LOW HIGH, LOW below HIGH")
    return low, high


def measured_range(rewards: Iterable[float]) -> Range:
    """The range of a task whose rewards have no known bounds: from the 1st to the 99th percentile of some of them.

    Both are rewards: the least ones that are at least as large as 1 % and 99 % of them. Equal ones are a ValueError.
    """
    ordered = sorted(map(float, rewards))
    low, high = (ordered[-(-len(ordered) * percent // 100) - 1] for percent in (1, 99))
    if same_reward(low, high):
        raise ValueError(f"the 1st and the 99th percentile of {len(ordered)} rewards are both {low:g}")
    return exact_reward(low), exact_reward(high)


def same_reward(first: float, second: float, size: float = 1.0) -> bool:
    """Whether rewards differ by at most `STEPS` rounding steps of float32 at `size`, that of their parts, or theirs."""
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.spacing(np.float32(max(abs(first), abs(second), size)))
    return first == second or bool(abs(first - second) <= STEPS * float(step))


def without_rounding(rewards: Iterable[float], ends: Sequence[float] = (0.0, 1.0)) -> tuple[float, ...]:
    """The rewards of one group, in which those that differ only by rounding are equal.

    From the least to the greatest, a reward is the same as the least one that differs from it only by rounding
    (`same_reward`). So all are equal if and only if the greatest is the same as the least. Rewards that are the same
    become the one with the shortest decimal form, or one of `ends`, the least and the greatest reward of the task, that
    is the same as one of them.
    """
    rewards, size = tuple(map(float, rewards)), max(map(abs, ends))
    values = sorted(set(rewards))
    if all(reward in ends for reward in values):
        return rewards
    sets: list[list[float]] = []
    for reward in values:
        if sets and same_reward(sets[-1][0], reward, size):
            sets[-1].append(reward)
        else:
            sets.append([reward])
    representatives = [same[0] if len(same) == 1 else min(same, key=_length) for same in sets]
    for end in ends:
        neighbour = min(values, key=lambda reward: abs(reward - end))
        if same_reward(neighbour, end, size):
            representatives[next(place for place, same in enumerate(sets) if neighbour in same)] = end
    replacements = {reward: value for same, value in zip(sets, representatives, strict=True) for reward in same}
    return tuple(replacements[reward] for reward in rewards)


def _length(reward: float) -> tuple[int, Fraction]:
    exact = exact_reward(reward)
    return exact.denominator, exact


def exact_rewards(rewards: Iterable[float], reward_range: Range) -> tuple[Fraction, ...]:
    """The rewards of one group as exact numbers, without rounding, mapped from their range to [0, 1]."""
    low, high = reward_range
    ends = {float(low): Fraction(0), float(high): Fraction(1)}
    return tuple(
        ends[reward] if reward in ends else (exact_reward(reward) - low) / (high - low)
        for reward in without_rounding(rewards, tuple(ends))
    )


def marks(rewards: np.ndarray, reward_range: Range) -> np.ndarray:
    """Single rewards of any shape, mapped from the task's range to [0, 1]. Those of full marks up to rounding are 1."""
    unique_rewards, places = np.unique(np.asarray(rewards, dtype=float), return_inverse=True)
    values = np.array([float(exact_rewards([reward], reward_range)[0]) for reward in unique_rewards], dtype=float)
    return values[places].reshape(np.shape(rewards))

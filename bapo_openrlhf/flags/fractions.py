"""Flags that are exact numbers from 0 to 1, or intervals of them."""

from typing import Any

from bapo_openrlhf.adapt.rewards import as_fraction
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.errors import ConfigError


def unit_fraction(name: str, value: Any) -> Any:
    """A flag's value as an exact number. Raises ConfigError unless it is one in [0, 1]."""
    try:
        number = as_fraction(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not 0 <= number <= 1:
        raise ConfigError(f"{name} is {value}; it must be in [0, 1]")
    return number


def interval(name: str, values: Any) -> Interval:
    """A flag's values, LOW HIGH or one, as an interval. Raises ConfigError unless they are one within [0, 1]."""
    values = values if isinstance(values, (list, tuple)) else [values]
    if len(values) not in (1, 2):
        raise ConfigError(f"{name} has {len(values)} values; it takes LOW HIGH, or one fixed value")
    low, high = unit_fraction(name, values[0]), unit_fraction(name, values[-1])
    if low > high:
        raise ConfigError(f"{name} is {values[0]} {values[1]}; LOW must not be above HIGH")
    return Interval(low, high)

"""Whether two objects hold the same, as a method and its copy that a checkpoint brings back must after a step."""

from collections import deque
from collections.abc import Container, Mapping, Set
from typing import Any

import numpy as np

PLAIN = (str, bytes, int, float, complex, type(None))


def differing(one: Any, other: Any, without: Container[str]) -> list[str]:
    """Names of the attributes that only one of two objects has, or that have different values in the two."""
    mine, theirs = vars(one), vars(other)
    seen: set[tuple[int, int]] = {(id(one), id(other))}
    return [
        name
        for name in sorted(mine.keys() | theirs.keys())
        if name not in without and (name not in mine or name not in theirs or not _same(mine[name], theirs[name], seen))
    ]


def _same(one: Any, other: Any, seen: set[tuple[int, int]]) -> bool:
    """Objects are by their attributes. What has neither attributes nor a comparison, as a lock, is the same."""
    if one is other or (id(one), id(other)) in seen:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other) or (one != one and other != other)  # nan is not equal to itself
    seen.add((id(one), id(other)))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.random.Generator):
        return str(one.bit_generator.state) == str(other.bit_generator.state)
    if isinstance(one, Mapping):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(_same(a, b, seen) and _same(x, y, seen) for (a, x), (b, y) in pairs)
    if isinstance(one, Set) and not all(isinstance(member, PLAIN) for member in one):
        return len(one) == len(other)  # members in no order, which may be equal without being the same
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(_same(*pair, seen) for pair in zip(one, other, strict=True))
    if not callable(one) and hasattr(one, "__dict__"):
        both = vars(one).keys() & vars(other).keys()  # a property may be worked out and kept in one of them
        return all(_same(getattr(one, name), getattr(other, name), seen) for name in both)
    return type(one).__eq__ is object.__eq__ or callable(one) or bool(one == other)

"""One step of a method without re-evaluation, as the tests of several methods take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.base import Method


def run(method: Method, step: int, fresh: Sequence[Group] = ()) -> Batch:
    """The batch of a step. Each of its groups ends in exactly one list of the batch."""
    assert method.begin_step(step) == []
    batch = method.build_batch(step, list(fresh), [])
    Ledger().settle(fresh, batch)
    return batch


def uids(groups: Iterable[Group]) -> list[int]:
    return [group.uid for group in groups]

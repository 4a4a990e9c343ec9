"""One step of a method without re-evaluation, and what the tests of several methods draw and read from a group."""

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.base import Method


def run(method: Method, step: int, fresh: Sequence[Group] = ()) -> Batch:
    """The batch of a step. Each of its groups ends in exactly one list of the batch."""
    assert method.begin_step(step) == []
    batch = method.build_batch(step, list(fresh), [])
    Ledger().settle(fresh, batch)
    assert batch.reevaluated == batch.unimproved == batch.solved == []
    return batch


def rewards_of(size: int) -> st.SearchStrategy[list[float]]:
    """Rewards of a group. Mostly they are 0/1, with every number of right ones equally likely."""
    binary = st.integers(0, size).map(lambda right: [1.0] * right + [0.0] * (size - right))
    return binary | binary | st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 3.0]), min_size=size, max_size=size)


def uids(groups: Iterable[Group]) -> list[int]:
    return [group.uid for group in groups]


def places(group: Group) -> list[int]:
    """Where its responses stood in the group that they were generated in."""
    return [int(response.token_ids[0]) // 100 for response in group.responses]


def names(group: Group) -> list[tuple[int, int]]:
    """The origin of each response of a group of `make`: uid of the group that it was generated in, and its place."""
    return [(response.extras["uid"], place) for response, place in zip(group.responses, places(group), strict=True)]

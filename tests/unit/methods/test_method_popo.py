"""POPO: batches by hand, and random runs against the rule written from its source."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import run, uids

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.methods.popo import POPO


def popo(capacity: int = 4, **options) -> POPO:
    return POPO(capacity=capacity, **{"group_size": 4} | options)


def test_by_hand(make_group):
    method = popo()
    first = [make_group(right, size=4) for right in (0, 1, 4, 2)]
    assert run(method, 0, first) == Batch(fresh=[first[1], first[3]], filtered=[first[0], first[2]])
    second = [make_group(right, size=4, step=1) for right in (4, 4, 3, 0)]  # three without signal, two are stored
    assert run(method, 1, second) == Batch(
        fresh=[second[2]], filtered=[second[0], second[1], second[3]], replayed=[first[3], first[1]]
    )
    third = [make_group(right, size=4, step=2) for right in (1, 2, 0, 4)]  # the newest two; first[3] a second time
    assert run(method, 2, third) == Batch(fresh=third[:2], filtered=third[2:], replayed=[second[2], first[3]])
    fourth = [make_group(2, size=4, step=3) for _ in range(4)]  # all have signal, so nothing is replaced
    assert run(method, 3, fourth) == Batch(fresh=fourth)


def test_any_two_rewards_that_differ_are_a_signal(make_group):
    method = popo()
    groups = [make_group(rewards) for rewards in ([-1.0, -1.0, -1.0, 0.5], [0.5] * 4, [0.2, 0.2, 0.2, 0.3])]
    run(method, 0, groups)
    assert uids(run(method, 1).replayed) == uids([groups[2], groups[0]])


def test_without_a_filter_no_fresh_group_gives_way(make_group):
    method = popo(filter="none")
    run(method, 0, [make_group(1, size=4)])
    fresh = [make_group(right, size=4, step=1) for right in (0, 4, 4)]
    batch = run(method, 1, fresh)
    assert batch.fresh == fresh and [group.step for group in batch.replayed] == [0]


@settings(derandomize=True, database=None, max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_random_runs_follow_the_rule_of_the_source(make_group, data):
    """The reference keeps all groups of the run, so the buffer of B groups is large enough."""
    capacity, size = data.draw(st.integers(1, 8)), data.draw(st.integers(2, 5))
    method, effective = popo(capacity, group_size=size), []
    right = st.lists(st.integers(0, size), max_size=10)
    for step in range(data.draw(st.integers(1, 9))):
        fresh = [make_group(count, size=size, step=step) for count in data.draw(right)]
        batch = run(method, step, fresh)
        kept = [group for group in fresh if 0 < sum(group.rewards) < size]
        assert len(batch.fresh) == min(len(kept), capacity) and set(uids(batch.fresh)) <= set(uids(kept))
        places = capacity - len(batch.fresh)
        assert uids(batch.replayed) == [group.uid for _, group in zip(range(places), reversed(effective), strict=False)]
        effective += kept

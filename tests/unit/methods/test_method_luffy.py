"""LUFFY: mixed groups by hand."""

from dataclasses import replace
from fractions import Fraction as F

import pytest

from bapo_openrlhf.adapt.batch import drop
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.luffy import LUFFY


def test_a_group_has_one_response_less_and_a_demonstration(make_group):
    method = LUFFY(capacity=4, group_size=4)
    assert method.first_responses == 3 and method.more_responses([[F(0)] * 3, [F(1)] * 3]) == [0, 0]
    wrong, some, right, unsolved = (make_group(right, size=3) for right in (0, 2, 3, 0))
    method.solutions = {group.prompt.id for group in (wrong, some, right)}
    batch = method.build_batch(0, [wrong, some, right, unsolved], [])
    assert [group.uid for group in batch.fresh] == [wrong.uid, some.uid]
    assert [group.mean for group in batch.fresh] == [F(1, 4), F(3, 4)]  # over 3 responses and the demonstration
    assert [group.size for group in batch.fresh] == [3, 3]
    assert [group.uid for group in batch.filtered] == [right.uid, unsolved.uid]
    assert [(shown.uid, shown.rewards) for shown in batch.demonstrations] == [
        (wrong.uid, (0.0, 0.0, 0.0, 1.0)),
        (some.uid, (1.0, 1.0, 0.0, 1.0)),
    ]
    assert (batch.responses, batch.samples) == (6, 8)
    Ledger().settle([wrong, some, right, unsolved], batch)


def test_a_demonstration_leaves_with_its_group(make_group):
    method = LUFFY(capacity=2, group_size=4)
    groups = [make_group(0, size=3) for _ in range(3)]
    method.solutions = {group.prompt.id for group in groups}
    batch = method.build_batch(0, groups, [])
    assert len(batch.cut) == 1 and batch.samples == 8
    first, second = batch.fresh
    left = drop(batch, too_far={first.uid})
    assert [shown.uid for shown in left.demonstrations] == [second.uid]
    Ledger().settle(groups, left)


def test_the_demonstration_has_the_greatest_reward_of_the_task(make_group):
    method = LUFFY(capacity=2, group_size=3)
    group = replace(make_group([-1.0, 2.0], size=2), reward_range=(F(-1), F(5)))
    method.solutions = {group.prompt.id}
    (shown,) = method.build_batch(0, [group], []).demonstrations
    assert shown.rewards == pytest.approx((-1.0, 2.0, 5.0))

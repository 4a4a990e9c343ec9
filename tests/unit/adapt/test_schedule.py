"""When the rollout engines follow the actor, against a simulation of Algorithm 1 step by step."""

import pytest

from bapo_openrlhf.adapt.schedule import RolloutSchedule, due

STEPS = 120


@pytest.mark.parametrize("delay", [1, 2, 5, 12])
def test_the_rollout_policy_is_that_of_algorithm_1(delay):
    """Lines 3-5: the rollout policy becomes the actor in each v-th step, and is the same in between."""
    schedule, policy = RolloutSchedule(delay), None
    for step in range(STEPS):
        follows = step in range(0, STEPS, delay)
        policy = step if follows else policy
        assert schedule.sync_due(step) is follows and schedule.rollout_step(step) == policy


@pytest.mark.parametrize("every", [1, 2, 5, 11])
def test_a_period_begins_at_step_0_in_which_nothing_is_due(every):
    assert [step for step in range(STEPS) if due(step, every)] == list(range(every, STEPS, every))
    assert not any(due(step, 0) for step in range(STEPS))

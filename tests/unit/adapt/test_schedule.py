"""When the rollout engines follow the actor, against a simulation of Algorithm 1 step by step."""

import itertools

import pytest

from bapo_openrlhf.adapt.schedule import due, rollout_step, sync_age

STEPS = 120


@pytest.mark.parametrize("delay", [1, 2, 5, 12])
def test_the_rollout_policy_is_that_of_algorithm_1(delay):
    """Lines 3-5: the rollout policy becomes the actor in each v-th step, and is the same in between."""
    policy = None
    for step in range(STEPS):
        policy = step if step in range(0, STEPS, delay) else policy
        assert rollout_step(step, delay) == policy


@pytest.mark.parametrize("delay", range(1, 9))
def test_the_age_in_syncs_counts_the_multiples_in_between(delay):
    for weights_version, step in itertools.combinations_with_replacement(range(STEPS // 3), 2):
        wanted = sum(t % delay == 0 for t in range(weights_version + 1, step + 1))
        assert sync_age(weights_version, step, delay) == wanted


@pytest.mark.parametrize("every", [1, 2, 5, 11])
def test_a_period_begins_at_step_0_in_which_nothing_is_due(every):
    assert [step for step in range(STEPS) if due(step, every)] == list(range(every, STEPS, every))
    assert not any(due(step, 0) for step in range(STEPS))

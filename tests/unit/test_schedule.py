"""Which weights the rollout engines hold, against a simulation of engines that are moved step by step."""

from __future__ import annotations

import itertools

import pytest

from bapo_openrlhf.adapt.schedule import RolloutSchedule

STEPS = 120  # a whole number of phases for every delay below
DELAYS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
PERIODS = (0, 1, 2, 3, 4, 5, 7, 11)
EVALUATIONS = (0, 1, 2, 3, 5, 9)


def simulate(delay: int, reevaluate_every: int, evaluate_every: int) -> tuple[list[int], set[int], set[int]]:
    """Engines that keep what they were last given, asked in turn for an evaluation, a rollout and a re-evaluation.

    Returns:
        The weights that each rollout saw, the steps of the syncs, and the steps of the weights that a rollout asked for
        after others had taken their place.
    """
    engine, seen, syncs, fetched_back = 0, [], set(), set()
    phase_started = 0
    for step in range(STEPS):
        if step % delay == 0:
            engine = phase_started = step
            syncs.add(step)
        if evaluate_every and step and step % evaluate_every == 0:
            engine = step
        if engine != phase_started:
            fetched_back.add(phase_started)
            engine = phase_started
        seen.append(engine)
        if reevaluate_every and step and step % reevaluate_every == 0:
            engine = step
    return seen, syncs, fetched_back


@pytest.mark.parametrize("delay", DELAYS)
def test_rollouts_and_kept_weights_match_the_simulation(delay):
    for again, evaluation in itertools.product(PERIODS, EVALUATIONS):
        schedule = RolloutSchedule(delay, again, evaluation)
        seen, syncs, fetched_back = simulate(delay, again, evaluation)
        assert [schedule.rollout_step(step) for step in range(STEPS)] == seen
        assert {step for step in range(STEPS) if schedule.sync_due(step)} == syncs
        assert {step for step in syncs if schedule.must_keep(step)} == fetched_back, (delay, again, evaluation)


def test_the_simulation_covers_both_answers():
    assert simulate(5, 5, 0)[2] == set()  # m = v: a re-evaluation meets the weights of a sync
    # 9, 54 and 99 come right before a sync, 45 and 90 with one
    assert simulate(5, 9, 0)[2] == {15, 25, 35, 60, 70, 80, 105, 115}
    assert simulate(1, 1, 1)[2] == set()


# Only a rollout that follows with the delayed weights makes keeping them worth while.
@pytest.mark.parametrize(
    ("delay", "again", "evaluation", "step", "kept"),
    [
        (5, 3, 0, 0, True),  # again at 3, then the rollout of 4
        (5, 3, 0, 5, True),  # again at 6, then the rollouts of 7 to 9
        (5, 9, 0, 5, False),  # again at 9, then the sync of 10
        (2, 3, 0, 2, False),  # step 3 is the last of its phase
        (2, 3, 3, 2, True),  # evaluated before the rollout of 3
        (5, 0, 0, 0, False),
        (5, 5, 5, 5, False),
        (5, 0, 4, 0, True),
    ],
)
def test_by_hand(delay, again, evaluation, step, kept):
    assert RolloutSchedule(delay, again, evaluation).must_keep(step) is kept


def test_nothing_is_due_at_step_0_but_the_sync():
    schedule = RolloutSchedule(5, 1, 1)
    assert schedule.sync_due(0)
    assert not schedule.reevaluation_due(0) and not schedule.evaluation_due(0)


@pytest.mark.parametrize("step", [1, 5, 100])
def test_period_0_is_never(step):
    schedule = RolloutSchedule(5, 0, 0)
    assert not schedule.reevaluation_due(step) and not schedule.evaluation_due(step)

"""Which weights the rollout engines hold, against a simulation of engines that are moved step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bapo_openrlhf.adapt.schedule import RolloutSchedule

STEPS = 120  # a whole number of phases for every delay below but 7
DELAYS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
PERIODS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11)
EVALUATIONS = (0, 1, 2, 3, 4, 5, 9)
SAVES = (0, 1, 2, 3, 4, 5)


class Missing(Exception):
    """The engines were asked for weights that are neither in them, nor the actor's, nor kept."""


class Machine:
    """Algorithm 1, one use of the engines after another. Weights are known by their step; today's are the actor's.

    The engines keep what they were last given. Of earlier weights, one set can be kept: at a sync, if `keep` says so.
    With `ahead`, the rollout that a step asks for is that of a later step, and comes after the step's re-evaluation.
    """

    def __init__(
        self,
        delay: int,
        again: int,
        evaluation: int,
        save: int = 0,
        *,
        keep: Callable[[int], bool],
        ahead: int = 0,
    ) -> None:
        self.delay, self.again, self.evaluation, self.save, self.keep = delay, again, evaluation, save, keep
        self.ahead = ahead
        self.step, self.engine, self.kept, self.phase = 0, None, None, None
        self.syncs: set[int] = set()
        self.fetched_back: set[int] = set()  # kept weights that were needed
        self.uses: list[tuple[str, int, int]] = []  # what for, in which step, with which weights

    def use(self, purpose: str, weights: int) -> None:
        """Have these weights in the engines."""
        if self.engine != weights:
            if weights != self.step:
                if self.kept != weights:
                    raise Missing(f"{purpose} in step {self.step} needs the weights of step {weights}")
                self.fetched_back.add(weights)
            self.engine = weights
        self.uses.append((purpose, self.step, weights))

    def run(self, until: int = STEPS) -> Machine:
        """Steps up to `until`, in OpenRLHF's order: sync, checkpoint, evaluation, rollout, re-evaluation, update."""
        while self.step < until:
            if self.step % self.delay == 0:  # lines 3-5
                self.engine = self.phase = self.step
                self.syncs.add(self.step)
                self.kept = self.step if self.keep(self.step) else None
            if self.save and self.step and self.step % self.save == 0:
                self.use("save", self.phase)  # a run that goes on from here must find them
            if self.evaluation and self.step and self.step % self.evaluation == 0:
                self.use("evaluation", self.step)
            again = self.again and self.step and self.step % self.again == 0  # lines 13-14
            for purpose, weights in (("re-evaluation", self.step), ("rollout", self.phase))[:: 1 if self.ahead else -1]:
                if purpose == "rollout" or again:
                    self.use(purpose, weights)
            self.step += 1
        return self

    def resume(self, step: int) -> Machine:
        """Go on in `step` from a checkpoint with the weights of the engines; kept are those, if at all."""
        self.step, self.phase = step, step - step % self.delay
        self.engine, self.kept = self.phase, self.phase if self.keep(self.phase) else None
        return self


def combinations(delay: int) -> Iterator[tuple[RolloutSchedule, tuple[int, int, int, int]]]:
    """Schedules of this delay, with v, m, and the periods of evaluations and checkpoints."""
    for again, evaluation, save in itertools.product(PERIODS, EVALUATIONS, SAVES):
        yield RolloutSchedule(delay, again, evaluation), (delay, again, evaluation, save)


@pytest.mark.parametrize("delay", DELAYS)
def test_everything_happens_when_and_with_what_algorithm_1_says(delay):
    for schedule, periods in combinations(delay):
        machine = Machine(*periods, keep=lambda step: True).run()
        steps = range(STEPS)
        due = [("rollout", step, schedule.rollout_step(step)) for step in steps]
        due += [("evaluation", step, step) for step in steps if schedule.evaluation_due(step)]
        due += [("re-evaluation", step, step) for step in steps if schedule.reevaluation_due(step)]
        assert sorted(use for use in machine.uses if use[0] != "save") == sorted(due), periods
        assert {step for step in steps if schedule.sync_due(step)} == machine.syncs


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("delay", DELAYS)
def test_weights_are_kept_exactly_when_they_are_needed_again(delay, ahead):
    for schedule, periods in combinations(delay):
        schedule = replace(schedule, ahead=ahead)
        machine = Machine(*periods, keep=lambda step: True, ahead=ahead).run()
        whole = {step for step in machine.syncs if step + delay <= STEPS}  # the run may end before they are needed
        assert {step for step in whole if schedule.must_keep(step)} == machine.fetched_back & whole, periods
        Machine(*periods, keep=schedule.must_keep, ahead=ahead).run()  # nothing is missing


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("delay", DELAYS)
def test_a_probe_needs_weights_as_a_reevaluation_does(delay, ahead):
    """Weights are kept if the re-evaluation needs them or if the probe does."""
    for again, probe, evaluation in itertools.product(PERIODS[:6], PERIODS[:6], (0, 4)):
        probed = RolloutSchedule(delay, again, evaluation, probe, ahead)
        of_one = [RolloutSchedule(delay, every, evaluation, ahead=ahead) for every in (again, probe)]
        for step in range(0, STEPS, delay):
            assert probed.must_keep(step) is any(schedule.must_keep(step) for schedule in of_one)
            assert probed.probe_due(step) is RolloutSchedule(delay, probe).reevaluation_due(step)


@pytest.mark.parametrize("delay", DELAYS)
def test_a_run_that_goes_on_from_any_step_finds_its_weights(delay):
    """Between two syncs as well: a checkpoint may be written in any step."""
    for again, evaluation in itertools.product(PERIODS, EVALUATIONS):
        keep = RolloutSchedule(delay, again, evaluation).must_keep
        whole = Machine(delay, again, evaluation, keep=keep).run().uses
        for step in range(3 * delay):
            resumed = Machine(delay, again, evaluation, keep=keep).resume(step).run(until=step + delay).uses
            assert resumed == [use for use in whole if step <= use[1] < step + delay]


@pytest.mark.parametrize("delay", DELAYS)
def test_rollout_and_reevaluation_of_a_step_with_a_sync_use_the_same_weights(delay):
    schedule = RolloutSchedule(delay, reevaluate_every=1)
    for step in range(1, STEPS):
        assert (schedule.rollout_step(step) == step) is schedule.sync_due(step)
        assert schedule.reevaluation_due(step)


def test_the_simulation_covers_both_answers():
    def fetched_back(*periods: int) -> set[int]:
        return Machine(*periods, keep=lambda step: True).run().fetched_back

    assert fetched_back(5, 5, 0) == set()  # m = v: a re-evaluation meets the weights of a sync
    # 9, 54 and 99 come right before a sync, 45 and 90 with one
    assert fetched_back(5, 9, 0) == {15, 25, 35, 60, 70, 80, 105, 115}
    assert fetched_back(1, 1, 1) == set()
    with pytest.raises(Missing, match="rollout in step 4 needs the weights of step 0"):
        Machine(5, 3, 0, keep=lambda step: False).run()


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

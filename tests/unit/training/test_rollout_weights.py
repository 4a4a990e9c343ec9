"""Which weights the rollout engines hold, on the fake stack."""

import itertools
from dataclasses import replace

import pytest
from fake_stack import World

from bapo_openrlhf.adapt.schedule import RolloutSchedule


def resuming(run: World, *, step: int, saved: int) -> World:
    """The world, once a run has resumed whose checkpoint of `step` has rollout weights of step `saved`."""
    run.updates["actor"] = run.trainer.state.step = step
    run.args.checked = replace(run.args.checked, resume_tag=f"global_step{step}")
    if saved != step:
        folder = run.checkpoints / "_adapt" / f"global_step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rollout_weights_rank0.safetensors").write_text(str(saved))
    run.trainer.checkpoints._resume_engines(saved)
    return run


class TestResumeEngines:
    @pytest.mark.parametrize(
        ("delay", "limit", "step", "saved", "events"),
        [
            # the engines held today's weights
            (4, None, 8, 8, [("sync", 8)]),
            # they held delayed ones
            (4, None, 9, 8, [("load", 8)]),
            (5, None, 2, 0, [("load", 0)]),
            # v is another one: the saved ones are not those of Algorithm 1
            (4, None, 9, 5, [("sync", 9)]),
            (2, None, 9, 9, [("sync", 9)]),  # was v = 3
            # with a limit on the distance, weights that came early are used
            (4, 0.5, 11, 8, [("load", 8)]),  # synced at a multiple of v
            (4, 0.5, 11, 10, [("load", 10)]),  # and here before that
            (4, 0.5, 9, 7, [("sync", 9)]),  # v was greater
        ],
    )
    def test_by_hand(self, world, delay, limit, step, saved, events):
        words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": 2, "adapt.max_shift_rollout": limit}
        created = resuming(world(engines=2, **words), step=step, saved=saved)
        each = [(name, argument) for name, argument in events for _ in range(1 if name == "sync" else 2)]
        assert created.events == each and created.trainer.state.step == step
        held = {created.trainer.rollout_weights.weights_version, *(engine.weights for engine in created.engines)}
        assert held == {events[0][1]}

    @pytest.mark.parametrize("before", [1, 2, 3, 5])
    @pytest.mark.parametrize("delay", [1, 2, 3, 4, 7])
    def test_no_weights_are_missing_whatever_the_schedule_was_and_is(self, world, before, delay):
        """Every rollout of the resumed run has the weights it should, and none asks for some that were not kept."""
        run = world()
        for step, again, evaluation in itertools.product(range(1, 13), (0, 1, 2, 3, 5), (0, 1, 3)):
            run.engines[0].weights, run.engines[0].kept = 0, None  # another process
            run.trainer.rollout_weights.schedule = RolloutSchedule(delay)
            run.trainer.rollout_weights.kept_version = None
            del run.events[:]
            resuming(run, step=step, saved=step - step % before)
            self.goes_on(run, delay=delay, again=again, evaluation=evaluation)
            assert run.noted("keep") == sorted(set(run.noted("restore")))  # each once, and only what comes back

    @staticmethod
    def goes_on(simulated: World, *, delay: int, again: int, evaluation: int) -> None:
        run, (engine,), start = simulated.trainer, simulated.engines, simulated.trainer.state.step
        first = start - start % delay
        assert engine.weights == (first if simulated.noted("load") else start)
        held = engine.weights
        for step in range(start, start + 2 * delay + 2):
            held = step if step % delay == 0 else held
            assert engine.weights == run.rollout_weights.weights_version == held
            if again and step % again == 0:
                with run.rollout_weights.synced_to(step, next_rollout=step + 1):
                    assert engine.weights == step
            simulated.updates["actor"] += 1
            run._sync(0.0)
            if evaluation and (step + 1) % evaluation == 0:
                with run.rollout_weights.synced_to(step + 1, next_rollout=step + 1):
                    assert engine.weights == step + 1

"""Which weights the rollout engines hold, on the fake stack."""

import itertools
from dataclasses import replace

import pytest
from fake_stack import World


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
    @pytest.mark.parametrize(("step", "saved", "events"), [
        (11, 8, [("load", 8)] * 2),  # synced at a multiple of v
        (11, 10, [("load", 10)] * 2),  # and here before that
        (9, 7, [("sync", 9)]),  # v was greater
    ])  # fmt: skip
    def test_weights_that_came_early_are_used(self, world, step, saved, events):
        words = {"adapt.rollout_delay": 4, "adapt.reevaluate_every": 2, "adapt.max_shift_rollout": 0.5}
        created = resuming(world(engines=2, **words), step=step, saved=saved)
        assert created.events == events and created.trainer.state.step == step
        held = {created.trainer.rollout_weights.weights_version, *(engine.weights for engine in created.engines)}
        assert held == {events[0][1]}

    @pytest.mark.parametrize("before", [1, 2, 3, 5])
    @pytest.mark.parametrize("delay", [1, 2, 3, 4, 7])
    def test_no_weights_are_missing_whatever_the_schedule_was_and_is(self, world, before, delay):
        """Every rollout of the resumed run has the weights it should, and none asks for some that were not kept."""
        run = world()
        for step, again, evaluation in itertools.product(range(1, 13), (0, 1, 2, 3, 5), (0, 1, 3)):
            run.engines[0].weights, run.engines[0].kept = 0, None  # another process
            run.trainer.rollout_weights.delay = delay
            run.trainer.rollout_weights.kept_version = None
            del run.events[:]
            saved, due = step - step % before, step - step % delay  # those of another v are not of Algorithm 1
            resuming(run, step=step, saved=saved)
            assert run.events == [("load", saved) if saved == due != step else ("sync", step)]
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

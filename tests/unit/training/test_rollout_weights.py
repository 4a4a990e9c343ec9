"""Which weights the rollout engines hold, on the fake stack."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

from fake_stack import World  # noqa: E402

from bapo_openrlhf.adapt.schedule import RolloutSchedule  # noqa: E402


class TestBroadcast:
    @pytest.mark.parametrize("delay", [1, 2, 3, 5])
    def test_counts_updates_and_syncs_at_multiples_of_v(self, world, delay):
        made = world(**{"adapt.rollout_delay": delay, "adapt.reevaluate_every": 0})
        for step in range(1, 13):
            made.updates["actor"] += 1
            made.trainer.broadcast_to_vllm()
            assert made.trainer.state.step == step
            assert made.trainer.rollout_weights.weights_version == made.engines[0].weights == step - step % delay
        assert made.noted("sync") == [step for step in range(1, 13) if step % delay == 0]


def resuming(made: World, *, step: int, saved: int) -> World:
    """The world, at the start of a resumed run whose checkpoint of `step` has rollout weights of step `saved`."""
    made.updates["actor"] = made.trainer.state.step = step
    made.trainer.checkpoints.resumed_weights_version = saved
    made.args.checked = replace(made.args.checked, resume_tag=f"global_step{step}")
    if saved != step:
        folder = made.checkpoints / "_adapt" / f"global_step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rollout_weights_rank0.safetensors").write_text(str(saved))
    return made


class TestResumeEngines:
    @pytest.mark.parametrize(
        ("delay", "again", "step", "saved", "events"),
        [
            # the engines held today's weights
            (1, 0, 7, 7, [("sync", 7)]),
            (4, 0, 8, 8, [("sync", 8)]),
            (4, 2, 8, 8, [("sync", 8), ("keep", 8)]),  # needed again after step 10
            # they held delayed ones
            (4, 0, 9, 8, [("load", 8)]),
            (4, 0, 11, 8, [("load", 8)]),
            (4, 4, 9, 8, [("load", 8)]),
            (4, 2, 9, 8, [("load", 8), ("keep", 8)]),
            # v is another one: the saved ones are not those of Algorithm 1
            (4, 0, 8, 5, [("sync", 8)]),
            (4, 0, 9, 5, [("sync", 9)]),
            (3, 0, 7, 5, [("sync", 7)]),
            (7, 0, 9, 5, [("sync", 9)]),
            (2, 0, 9, 9, [("sync", 9)]),  # was v = 3
            (7, 5, 9, 5, [("sync", 9), ("keep", 9)]),  # hard prompts in step 10, the next sync before step 14
        ],
    )
    def test_by_hand(self, world, delay, again, step, saved, events):
        words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": again}
        made = resuming(world(engines=2, **words), step=step, saved=saved)
        made.trainer.broadcast_to_vllm()
        each = [(name, argument) for name, argument in events for _ in range(1 if name == "sync" else 2)]
        assert made.events == each
        assert made.trainer.state.step == step and made.trainer.checkpoints.resumed_weights_version is None
        wanted = events[0][1]
        assert made.trainer.rollout_weights.weights_version == wanted and {
            engine.weights for engine in made.engines
        } == {wanted}
        # once: the next broadcast is after an update
        made.updates["actor"] += 1
        made.trainer.broadcast_to_vllm()
        assert made.trainer.state.step == step + 1

    def test_weights_of_step_0_are_weights(self, world):
        made = resuming(world(**{"adapt.rollout_delay": 5, "adapt.reevaluate_every": 0}), step=2, saved=0)
        made.trainer.broadcast_to_vllm()
        assert (
            made.noted("load") == [0]
            and made.trainer.rollout_weights.weights_version == 0
            and made.trainer.state.step == 2
        )

    @pytest.mark.parametrize("before", [1, 2, 3, 5])
    @pytest.mark.parametrize("delay", [1, 2, 3, 4, 7])
    def test_no_weights_are_missing_whatever_the_schedule_was_and_is(self, world, before, delay):
        """Every rollout of the resumed run has the weights it should, and none asks for some that were not kept."""
        made = world()
        for step, again, evaluation in itertools.product(range(1, 13), (0, 1, 2, 3, 5), (0, 1, 3)):
            made.engines[0].weights, made.engines[0].kept = 0, None  # another process
            made.trainer.rollout_weights.schedule = RolloutSchedule(delay, again, evaluation)
            del made.events[:]
            resuming(made, step=step, saved=step - step % before)
            self.goes_on(made, delay=delay, again=again, evaluation=evaluation)

    @pytest.mark.parametrize(
        ("step", "saved", "events"),
        [
            (11, 8, [("load", 8)]),  # synced at a multiple of v = 4
            (11, 10, [("load", 10)]),  # and here before that
            (9, 7, [("sync", 9)]),  # v was greater
            (10, 10, [("sync", 10)]),
        ],
    )
    def test_weights_that_came_early_are_used(self, world, step, saved, events):
        words = {"adapt.rollout_delay": 4, "adapt.reevaluate_every": 0, "adapt.max_shift_rollout": 0.5}
        made = resuming(world(**words), step=step, saved=saved)
        made.trainer.broadcast_to_vllm()
        assert made.events == events and made.trainer.rollout_weights.weights_version == events[0][1]

    @staticmethod
    def goes_on(made: World, *, delay: int, again: int, evaluation: int) -> None:
        run, (engine,), start = made.trainer, made.engines, made.trainer.state.step
        first = start - start % delay
        run.broadcast_to_vllm()
        assert engine.weights == (first if made.noted("load") else start)
        held = engine.weights
        for step in range(start, start + 2 * delay + 2):
            held = step if step % delay == 0 else held
            assert engine.weights == run.rollout_weights.weights_version == held
            if again and step % again == 0:
                with run.rollout_weights.synced_to(step, next_rollout=step + 1):
                    assert engine.weights == step
            made.updates["actor"] += 1
            run.broadcast_to_vllm()
            if evaluation and (step + 1) % evaluation == 0:
                with run.rollout_weights.synced_to(step + 1, next_rollout=step + 1):
                    assert engine.weights == step + 1

"""A trainer that is told to stop: where it stops, what it saves, and what its resume is."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_stack import AdaptedPPOTrainer, World, trained, without_times
from test_checkpoints import REPEATABLE, resumed

from bapo_openrlhf.record.run_record import read_evaluations
from bapo_openrlhf.training.trainer.plain_trainer import RecordedPPOTrainer
from bapo_openrlhf.training.trainer.run_state import RunState

NEVER = {"ckpt.save_steps": -1}
EVALUATED = {"eval.steps": 3, "evaluation": 2}
AHEAD = {"train.async_enable": True, "train.async_queue_size": 2}


def stop_in(run: World, step: int, phase: str) -> World:
    """Tell the trainer to stop when a phase begins."""

    class Told(RunState):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "phase" and (self.step, value) == (step, phase):
                run.trainer.stop()

    run.trainer.state.__class__ = Told
    return run


@pytest.mark.parametrize(("words", "step", "phase", "after"), [
    (NEVER, 2, "generating", 3),
    (NEVER, 2, "generating hard prompts again", 3),
    (NEVER, 3, "making the batch", 4),  # the last one of an epoch
    (NEVER, 2, "training", 3),
    (NEVER, 3, "finishing the step", 3),
    ({"ckpt.save_steps": 2}, 4, "saving checkpoint global_step4", 4),
    (NEVER | EVALUATED, 2, "training", 3),
    (NEVER | EVALUATED, 3, "evaluating", 3),  # as the best so far
    (EVALUATED | {"ckpt.save_steps": 3}, 3, "evaluating", 3),
    (NEVER | EVALUATED | {"ckpt.best_metric_key": "none"}, 3, "evaluating", 4),
    (NEVER | AHEAD, 0, "generating", 1),
    (NEVER | AHEAD, 2, "training", 3),
    (NEVER | {"algorithm": "ba_ppo"}, 2, "training", 3),
])  # fmt: skip
def test_it_stops_when_the_step_is_saved_and_the_resume_is_the_run_that_was_never_stopped(
    world, tmp_path, words, step, phase, after
):
    """For each value of ckpt.save_steps. The engines hold delayed weights, and two epochs have eight steps."""
    words = REPEATABLE | {"adapt.rollout_delay": 3} | words
    whole = world(**words)
    assert whole.trainer.fit() is None
    run = stop_in(world(**words), step, phase)
    assert run.trainer.fit() == after
    store = run.trainer.checkpoints.store
    (tag,) = [tag for tag in store.tags() if tag.endswith(f"global_step{after}")][:1]
    store.check(tag)
    assert len(run.metrics()) == after
    again = resumed(run, tmp_path / "again", tag, **{n: v for n, v in words.items() if n != "evaluation"})
    assert again.trainer.fit() is None
    assert without_times(again) == without_times(whole)
    assert trained(again, 0) == trained(whole, after)


@pytest.mark.parametrize("kind", [AdaptedPPOTrainer, RecordedPPOTrainer])
@pytest.mark.parametrize("step", [4, 8])  # after the last step nothing is left to train
def test_an_evaluation_that_was_interrupted_is_made_again(world, kind, step):
    words = REPEATABLE | {"eval.steps": 4, "ckpt.save_steps": 4}
    words |= {"algorithm": "grpo"} if kind is RecordedPPOTrainer else {"adapt.rollout_delay": 3}
    whole, run = (world(evaluation=2, kind=kind, **words) for _ in range(2))
    whole.trainer.fit()
    generate = run.trainer.samples_generator.generate_eval_samples

    def interrupted(**kwargs):
        if run.trainer.state.step == step:
            raise KeyboardInterrupt
        return generate(**kwargs)

    run.trainer.samples_generator.generate_eval_samples = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.trainer.fit()
    folder = run.checkpoints.parent
    again = World(folder, words | {"ckpt.load_enable": True}, prompts=16, evaluation=2, engines=1)
    again.choose_start()
    again.make_trainer(kind)
    again.trainer.fit()
    rows, expected = (read_evaluations(one.trainer.recorder.folder) for one in (again, whole))
    assert rows == expected and [row["step"] for row in rows] == [4, 8]
    assert again.trainer.best_eval_metric_value == whole.trainer.best_eval_metric_value


def test_when_its_data_has_ended_it_goes_to_its_end(world):
    run = stop_in(world(prompts=7, **NEVER), 3, "training")
    assert run.trainer.fit() is None
    assert run.trainer.checkpoints.store.tags() == ["global_step4"] and len(run.metrics()) == 4


def test_before_its_first_step_nothing_is_saved_yet(world):
    run = world(**NEVER)
    run.trainer.stop()
    assert run.trainer.fit() == 1


def test_after_a_resume_the_step_of_the_checkpoint_is_saved(world, tmp_path):
    run = stop_in(world(**REPEATABLE), 2, "training")
    run.trainer.fit()
    again = resumed(run, tmp_path / "again", "global_step3", **REPEATABLE)
    resume, places = again.trainer.checkpoints.resume, []
    again.trainer.checkpoints.resume = lambda states: places.extend([resume(states), again.trainer.place()])
    again.trainer.stop()
    assert again.trainer.fit() == 3 and again.requests == []
    assert places[1] == (0, "syncing weights")  # this process has begun no step


@pytest.mark.parametrize("kind", [None, RecordedPPOTrainer])
def test_without_checkpoints_it_stops_at_the_end_of_the_step(world, kind):
    plain = {"algorithm": "grpo", "kind": kind} if kind else {}
    run = stop_in(world(**plain, **{"ckpt.disable_ds": True}), 1, "training")
    assert run.trainer.fit() == 2
    assert not run.checkpoints.exists()


@pytest.mark.parametrize(
    ("step", "phase", "after"),
    [(0, "generating", 1), (1, "training", 2), (2, "finishing the step", 2), (4, "saving checkpoint global_step4", 4)],
)
def test_of_a_run_without_batch_adaptation(world, step, phase, after):
    run = stop_in(world(algorithm="grpo", kind=RecordedPPOTrainer, **{"ckpt.save_steps": 4}), step, phase)
    assert run.trainer.fit() == after
    assert (run.checkpoints / "_actor" / "latest").read_text() == f"global_step{after}"
    assert [row["step"] for row in run.metrics()] == list(range(1, after + 1))


def test_logs_are_closed_as_at_the_end_of_a_run(world):
    closed = []
    run = stop_in(world(**NEVER), 1, "training")
    run.trainer.wandb_logger = SimpleNamespace(
        log_train=lambda *_: None, close=lambda: closed.append(run.trainer.state.step)
    )
    run.trainer.fit()
    assert closed == [2]


def test_where_it_is(world):
    run = world(**NEVER)
    assert run.trainer.place() == (0, "starting")
    run.trainer.fit()
    assert run.trainer.place() == (8, "ending")

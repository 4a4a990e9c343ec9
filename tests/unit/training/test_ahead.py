"""Runs on the fake stack in which generation is ahead of training (`--train.async_enable`)."""

import itertools
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_stack import SCORED, World, numbers, trained, watched, without_times
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_checkpoints import REPEATABLE, continued, resumed

from bapo_openrlhf.record.state_file import load_state
from bapo_openrlhf.training.trainer.engine_calls import prompt_seed
from bapo_openrlhf.training.trainer.fresh import TrainingPrompts


def ahead(queue: int, delay: int, again: int = 2, **words) -> dict:
    words = {"train.async_enable": True, "train.async_queue_size": queue, "adapt.rollout_delay": delay} | words
    return words | {"adapt.reevaluate_every": again, "train.num_episodes": 3}


def periods():
    """Queue, delay and m. Without the slow ones, any two of them meet, and each value is there."""
    for places in itertools.product(enumerate((1, 2, 4)), enumerate((1, 2, 3, 5)), enumerate((1, 2, 3))):
        meet = sum(place for place, _ in places) % 3 == 0
        yield pytest.param(*(value for _, value in places), marks=() if meet else pytest.mark.slow)


@pytest.mark.parametrize(("queue", "delay", "again"), periods())
def test_every_response_is_of_the_weights_that_the_definition_says(world, queue, delay, again):
    """Rollout t: those that the engines hold in step max(0, t - q). Hard prompts: those of the step that names them."""
    run = world(**ahead(queue, delay, again, **{"adapt.max_failed_share": 1}))
    seen = watched(run)
    run.trainer.fit()
    updates = {step: count for step, *_, count in seen}
    assert sorted(updates) == list(range(12))
    named = Counter()
    for step, fresh, hard, _ in seen:
        asked = max(0, step - queue)
        known = {(group.step, group.weights_version) for group in fresh}
        assert len(fresh) == 4 and known == {(step, asked - asked % delay)}
        assert step - fresh[0].weights_version <= min(step, queue) + delay - 1
        for group in hard:
            # With the rollout of step t + q if the engines hold the weights of step t, otherwise in step t.
            assert group.step == step and group.weights_version in (step, step - queue)
            assert (group.weights_version % delay == 0) == (group.weights_version != step)
            assert group.weights_version % again == 0 < group.weights_version
            named[group.weights_version] += 1
        for group in (*fresh, *hard):
            for response in group.responses:
                wanted = run.log_probs(response.token_ids.tolist(), updates[group.weights_version])
                assert response.log_probs.tolist() == pytest.approx(wanted[1:])
    due = range(again, 12 - queue, again)
    assert {step % delay == 0 for step in named} == {step % delay == 0 for step in due}


@pytest.mark.parametrize(("queue", "delay", "algorithm"), [
    pytest.param(*case, marks=() if case in ((1, 1, "bapo_grpo"), (2, 3, "ba_ppo")) else pytest.mark.slow)
    for case in itertools.product((1, 2), (1, 3), ("bapo_grpo", "ba_ppo"))
])  # fmt: skip
def test_without_staleness_it_is_the_synchronous_run(world, algorithm, delay, queue):
    words = {"algorithm": algorithm, "adapt.rollout_delay": delay, "train.num_episodes": 3} | REPEATABLE
    runs = []
    for mode in ({}, {"train.async_enable": True, "train.async_queue_size": queue, "adapt.max_staleness": 0}):
        run = world(prompts=8, **words, **mode)
        plain, calls = run.reward, itertools.count()
        # All responses of step 0 are wrong, so its batch is empty.
        run.reward = lambda *what, plain=plain, calls=calls: float(next(calls) >= 16 and plain(*what))
        run.trainer.fit()
        runs.append(run)
    ours, theirs = runs
    assert numbers(ours.metrics()) == numbers(theirs.metrics()) and trained(ours, 0) == trained(theirs, 0)
    assert ours.requests == theirs.requests and ours.events[1:] == theirs.events[1:]  # the first has objects
    rows = theirs.metrics()
    assert sum(row["groups/reevaluated"] for row in rows) and sum(row["groups/replayed"] for row in rows)
    assert any(row.get("skipped_update") for row in rows)


@pytest.mark.parametrize(("queue", "delay", "again"), [(1, 2, 1), (3, 2, 1), (2, 3, 1), (1, 1, 2)])
def test_no_two_prompts_of_a_run_have_the_same_seed(world, queue, delay, again):
    """A step may generate hard prompts again for which its rollout, asked for earlier, took others along."""
    run = world(**ahead(queue, delay, again) | REPEATABLE)
    seen = watched(run)
    run.trainer.fit()
    ages = [{step - group.weights_version for group in hard} for step, _, hard, _ in seen]
    assert {0, queue} in ages or delay == 1  # both kinds in one step
    seeds = [request.seed for request in run.requests]
    assert None not in seeds and len(set(seeds)) == len(seeds) > 48


@pytest.mark.parametrize("queue", [1, 3])
def test_evaluations_have_the_seeds_of_their_step(fitted, tmp_path, queue):
    """Whether a rollout was asked for in the step or not; so a resumed run has them too."""
    words = ahead(queue, 1, **{"eval.steps": 1}) | REPEATABLE
    run = fitted(prompts=9, evaluation=2, **words)
    assert run.trainer.state.step == 9 and any(row["rollouts/step"] for row in run.metrics())
    places = itertools.product(range(1, 10), (0, 1))
    wanted = [(step, f"eval {n}", prompt_seed(run.args.train.seed, step, "evaluation", n)) for step, n in places]
    again = continued(run, tmp_path / "again", "global_step6", **words)
    for one, evaluations in ((run, wanted), (again, wanted[12:])):
        asked = [(r.step, r.prompt, r.seed) for r in one.requests if r.prompt.startswith("eval")]
        assert asked == evaluations


def test_staleness_is_bounded_below_the_queue(fitted):
    run = fitted(**ahead(3, 2, **{"adapt.max_staleness": 1}))
    lags = [row["staleness/rollout_policy"] for row in run.metrics()]
    assert lags == [0, 1, 2, 1] + [2, 1] * 4


@pytest.mark.parametrize("case", [
    {"queue": 2, "delay": 1, "prompts": 14, "algorithm": "ba_ppo"},
    {"queue": 1, "delay": 3, "prompts": 14, "algo.kl.init_coef": 0.02},
    {"queue": 3, "delay": 2, "prompts": 9, "adapt.max_shift_replayed": 1e-3},
    {"queue": 2, "delay": 2, "prompts": 14, **SCORED},
    {"queue": 2, "delay": 1, "prompts": 32, "adapt.partial_rollout_tokens": 2},
], ids=lambda case: " ".join(map(str, case.values())))  # fmt: skip
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(fitted, tmp_path, case, every):
    words = ahead(case["queue"], case["delay"]) | REPEATABLE
    words |= {name: value for name, value in case.items() if "." in name or name == "algorithm"}
    run = fitted(prompts=case["prompts"], **words)
    tags = sorted(run.trainer.checkpoints.store.tags())
    assert len(tags) == run.trainer.state.step
    for tag in tags[:-1][::every]:
        step = int(tag.rpartition("step")[2])
        again = continued(run, tmp_path / f"from {tag}", tag, **words)
        assert trained(again, 0) == trained(run, step), tag
        assert without_times(again) == without_times(run)
        assert (again.record / "groups.jsonl").read_text() == (run.record / "groups.jsonl").read_text()
        assert again.updates == run.updates and again.engines[0].weights == run.engines[0].weights
        assert repr(again.trainer.method.state_dict()) == repr(run.trainer.method.state_dict())
        # Nothing is generated again that the checkpoint has.
        asked = {(request.prompt, request.seed) for request in again.requests}
        assert asked <= {(request.prompt, request.seed) for request in run.requests}
        if "adapt.partial_rollout_tokens" in case:
            continue  # a group has several requests
        saved = load_state(run.trainer.checkpoints.store.folder(tag))["ahead"]["rollouts"]
        in_flight = sum(len(rollout["fresh"]) + len(rollout["hard"]) for rollout in saved)
        generated = sum(row["groups/generated"] for row in run.metrics()[:step])
        assert len(again.requests) == len(run.requests) - generated - in_flight


def test_a_checkpoint_waits_for_rollouts_that_still_read_prompts(fitted, tmp_path, monkeypatch):
    """Otherwise a resumed run would read these prompts a second time."""
    draw = TrainingPrompts.draw

    def slow(self, count):
        time.sleep(0.02 * count)
        return draw(self, count)

    monkeypatch.setattr(TrainingPrompts, "draw", slow)
    words = ahead(1, 4, 0) | REPEATABLE
    run = fitted(prompts=14, **words)
    again = continued(run, tmp_path / "again", "global_step2", **words)
    assert trained(again, 0) == trained(run, 2)


EVENTS = ("generate", "forward", "fit", "broadcast", "save_checkpoint", "keep_weights")


@settings(max_examples=settings.default.max_examples // 8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    queue=st.integers(1, 4), staleness=st.none() | st.integers(1, 3), delay=st.integers(1, 5), again=st.integers(0, 4),
    prompts=st.integers(4, 17), saves=st.integers(1, 3),
    crashes=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), max_size=3),
)  # fmt: skip
def test_any_run_with_any_crashes_is_the_run_that_was_never_stopped(
    no_ray, queue, staleness, delay, again, prompts, saves, crashes
):
    """What is asked for, arrives, is synced, crashes and resumes in any order; every group is trained on once."""
    words = ahead(queue, delay, again) | REPEATABLE | {"ckpt.save_steps": saves}
    words |= {} if staleness is None else {"adapt.max_staleness": staleness}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, run = (World(folder / name, words, prompts=prompts) for name in ("whole", "run"))
        whole.make_trainer().fit()
        run.make_trainer()
        for event, step in crashes:
            run.faults[event] = step, ValueError("crash")
            try:
                run.trainer.fit()
            except RuntimeError as error:
                assert "crash" in str(error)
            run = World(folder / "run", words | {"ckpt.load_enable": True}, prompts=prompts)
            if run.choose_start() is None:  # from the beginning
                shutil.rmtree(run.args.run.dir, ignore_errors=True)
            run.make_trainer()
        run.trainer.fit()
        assert without_times(run) == without_times(whole)
        assert run.updates == whole.updates
        assert (run.record / "groups.jsonl").read_text() == (whole.record / "groups.jsonl").read_text()
        for row, wanted in zip(run.metrics(), itertools.count(0)):
            lag = row["staleness/rollout_policy"]
            assert lag <= min(wanted, queue, queue if staleness is None else staleness) + delay - 1


def assert_each_in_flight_is_somewhere(run: World) -> None:
    """The hard prompts in flight are those of the rollouts that exist, and those that the next rollout takes along."""
    hard, ahead = run.trainer.method.hard, run.trainer.samples_generator.rollouts
    rollouts = [future.result() for future in ahead.queue]
    left = [*ahead.hard_prompts_left, *(prompt for rollout in rollouts for prompt in rollout.hard_prompts_left)]
    texts = {prompt.text for prompt in (*left, *(answers.prompt for rollout in rollouts for answers in rollout.hard))}
    assert texts == {hard._entries[name].prompt.text for name in hard._in_flight}


def segments_of(segments: list[dict], prompts: int, folder: Path) -> None:
    """Make runs with these flags one after the other, each from the last checkpoint. All prompts are hard.

    A run stops after its "steps"; None: at the end of its data.
    """
    tag, done = None, 0
    for part in segments:
        words = ahead(part["queue"], part["delay"], part["again"]) | REPEATABLE | {"adapt.buffer_size": 64}
        words |= {flag: part[flag] for flag in part if "." in flag} | ({"ckpt.load_enable": True} if tag else {})
        run = World(folder, words, prompts=prompts)
        run.reward = lambda *_: 0.0
        if tag:
            run.choose_start()
        run.make_trainer()
        if part["steps"] is not None:  # it stops when no hard prompt is on its way
            run.faults["save_checkpoint"] = done + part["steps"], ValueError("stopped")
        try:
            run.trainer.fit()
        except RuntimeError as error:
            assert "stopped" in str(error)
        run.trainer.rollout_weights.queue.wait()
        assert_each_in_flight_is_somewhere(run)
        tag = run.trainer.checkpoints.store.newest_whole(lambda _: None)
        done = int(tag.removeprefix("global_step")) if tag else 0
    assert run.trainer.state.step == words["train.num_episodes"] * -(-prompts // 4)


def segment(queue, steps=None, delay=1, again=1, **words) -> dict:
    return {"queue": queue, "steps": steps, "delay": delay, "again": again, **words}


@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.integers(4, 17),
    segments=st.lists(
        st.builds(
            segment, st.integers(1, 4), st.none() | st.integers(1, 6), st.integers(1, 3), st.integers(1, 3),
            **{"adapt.max_staleness": st.none() | st.integers(1, 3)},
        ),
        min_size=2,
        max_size=4,
    ),
    more=st.tuples(st.integers(1, 3), *[st.integers(0, 2)] * 3),
)  # fmt: skip
@example(prompts=16, segments=[segment(4, 5), segment(3)], more=(3, 0))  # a shorter queue
@example(prompts=16, segments=[segment(4, 5), segment(1)], more=(3, 0))  # a much shorter queue
@example(prompts=16, segments=[segment(4, 5), segment(4, **{"adapt.max_staleness": 1})], more=(3, 0))
@example(prompts=16, segments=[segment(1), segment(1)], more=(1, 2))  # more epochs
@example(prompts=14, segments=[segment(2), segment(2)], more=(1, 2))  # more epochs after one that was not full
@example(prompts=14, segments=[segment(4, delay=2), segment(1, again=2)], more=(1, 2))  # all at once
def test_no_hard_prompt_is_left_behind_whatever_changes_at_a_resume(no_ray, prompts, segments, more):
    epochs = itertools.accumulate(more)
    segments = [part | {"train.num_episodes": count} for part, count in zip(segments, epochs, strict=False)]
    segments[-1]["steps"] = None
    with tempfile.TemporaryDirectory() as name:
        segments_of(segments, prompts, Path(name))


def test_a_checkpoint_with_rollouts_is_not_for_a_synchronous_run(fitted, tmp_path):
    words = ahead(2, 1) | REPEATABLE
    run = fitted(**words)
    words.pop("train.async_enable")
    again = resumed(run, tmp_path / "again", "global_step3", **words)
    with pytest.raises(RuntimeError, match="global_step3 has 2 rollouts"):
        again.trainer.fit()


def test_a_synchronous_run_goes_on_ahead(fitted, tmp_path):
    words = {"adapt.rollout_delay": 1, "train.num_episodes": 3} | REPEATABLE
    more = {"train.async_enable": True, "train.async_queue_size": 2}
    again = continued(fitted(**words), tmp_path / "again", "global_step4", **words, **more)
    assert [row["staleness/rollout_policy"] for row in again.metrics()] == [0] * 4 + [0, 1] + [2] * 6


@pytest.mark.parametrize("queue", [1, 2])
def test_a_rollout_that_fails_stops_the_run_with_its_reason(world, queue):
    """The weights say which rollout fails. The trainer's step does not, because it changes while a rollout goes on."""
    run = world(**ahead(queue, 1))

    def reward(prompt, weights, sample):
        if weights == 3:
            raise ValueError("the engine is gone")
        return World.reward(run, prompt, weights, sample)

    run.reward = reward
    with pytest.raises(RuntimeError, match=r"^step 4, syncing weights: ValueError: the engine is gone$"):
        run.trainer.fit()


def test_a_loader_is_asked_for_one_thing_at_a_time():
    """Its state is not read while another thread makes its iterator."""
    begun, goes_on, done = threading.Event(), threading.Event(), threading.Event()

    class Loader:
        def __iter__(self):
            begun.set()
            assert goes_on.wait(30)
            return iter([1, 2])

        def state_dict(self):
            done.set()
            return {}

    prompts = TrainingPrompts(Loader())
    threads = [threading.Thread(target=prompts.draw, args=(0,)), threading.Thread(target=prompts.state_dict)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    assert not done.wait(0.2)
    goes_on.set()
    assert done.wait(30)
    for thread in threads:
        thread.join()

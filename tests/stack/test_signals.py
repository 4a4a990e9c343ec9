"""Real signals to the driver, and workers that are stopped: where the run stops, what it says, and its resume.

In `make test`, a run of test_resume.py gets a signal.
"""

import json
import os
import re
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from test_faults import (
    AGAIN,
    AHEAD,
    GRPO,
    PROBE,
    RUN,
    assert_nothing_is_left,
    marked,
    processes_of,
    same_steps,
    uninterrupted,
)  # fmt: skip

pytestmark = [pytest.mark.stack, pytest.mark.slow]

# Signal, step, the beginning of the phase, and the step after which the run stops. v = 3 and m = 2, as in test_faults.
IN_TURN = (
    ("SIGTERM", 0, "syncing", 1),  # later, a run syncs first when it is resumed
    ("SIGINT", 1, "generating", 2),
    ("SIGUSR1", 2, "generating hard", 3),
    ("SIGTERM", 3, "making experience", 4),
    ("SIGINT", 4, "training", 5),
)
AHEAD_IN_TURN = (
    ("SIGUSR1", 0, "syncing", 1),
    ("SIGTERM", 1, "generating", 2),
    ("SIGINT", 2, "training", 3),
    ("SIGTERM", 3, "making experience", 4),
    ("SIGUSR1", 4, "generating hard", 5),
)


def end_of(result):
    """What run.json says of the end of a run, whose last line says it too, once and without a traceback."""
    end = json.loads((result.folder / "run.json").read_text())["ended"]
    assert result.output.splitlines().count(end["text"]) == 1, result.output[-4000:]
    assert "Traceback" not in result.output and result.status == end["status"]
    return end


def stopped_and_resumed(train, name, signals, reference, more):
    """Stop a run with one signal after the other, each time from where it stopped, and then let it come to its end.

    A step is saved only because of the signal.
    """
    values, marks = RUN | GRPO | {"ckpt__save_steps": -1} | more, []
    for index, (number, step, phase, after) in enumerate(signals):
        marks.append(uuid.uuid4().hex)
        process, status = marked(marks[-1], f"driver:{number}/{step}/{phase}/0"), 128 + getattr(signal, number)
        result = train(name, *PROBE, status=status, **process, **values | (AGAIN if index else {}))
        end = end_of(result)
        assert end["how"] == "stopped"
        assert end["text"].startswith(f"stopped by {number} after step {after}. It goes on with step {after + 1}: ")
        assert end["text"].count("--ckpt.load_enable") == 1
        assert not index or f"resuming from global_step{step}" in result.output
    result = train(name, own_ray=True, **values | AGAIN)
    same_steps(result.metrics, reference.metrics)
    assert json.loads((result.folder / "run.json").read_text())["ended"]["how"] == "finished"
    for mark in marks:
        assert_nothing_is_left(mark)


@pytest.fixture(scope="module")
def grpo(train):
    return uninterrupted(train, "signals_whole", GRPO)


def test_in_each_phase(train, grpo):
    stopped_and_resumed(train, "signals", IN_TURN, grpo, {})


def test_in_each_phase_with_generation_ahead_of_training(train):
    whole = train("signals_ahead_whole", own_ray=True, **RUN | GRPO | AHEAD | {"ckpt__save_steps": -1})
    stopped_and_resumed(train, "signals_ahead", AHEAD_IN_TURN, whole, AHEAD)


def test_while_a_checkpoint_is_written_and_at_once(train, grpo):
    """The first signal finds the step that it is about to save; the second run may not wait for the end of a step."""
    values, mark = RUN | GRPO | {"ckpt__save_steps": 2}, uuid.uuid4().hex
    first = train("signals_saving", *PROBE, status=143, **marked(mark, "driver:SIGTERM/2/saving/0"), **values)
    assert end_of(first)["text"].startswith("stopped by SIGTERM after step 2. It goes on with step 3: ")
    values, process = values | AGAIN, marked(mark, "driver:SIGINT/3/training/0")
    second = train("signals_saving", *PROBE, status=130, run__grace_seconds=0, **process, **values)
    assert "stopped by SIGINT within step 4, " in end_of(second)["text"]
    assert ", because the step did not end within run.grace_seconds 0. It goes on with step 3: " in second.output
    third = train("signals_saving", own_ray=True, **values)
    same_steps(third.metrics, grpo.metrics)
    assert_nothing_is_left(mark)


@pytest.mark.parametrize(
    ("victim", "name"), [("actor", "actor rank 0"), ("engine", "rollout engine 0"), ("trainer", "trainer")]
)
def test_a_process_that_is_stopped(train, grpo, victim, name):
    mark, run, phase = uuid.uuid4().hex, f"stall_{victim}", "generating" if victim == "engine" else "training"
    process = marked(mark, f"{victim}:SIGSTOP/3/{phase}/0")
    end = end_of(train(run, *PROBE, status=75, run__stall_timeout=15, **process, **RUN | GRPO))
    assert end["how"] == "stalled"
    known = "[34], [a-z ]+" if victim == "trainer" else f"4, {phase}"  # as the trainer said last
    who = rf"It waits for {name} \(process \d+ on \S+, which is stopped\)"
    wanted = rf"stalled for run\.stall_timeout 15: step {known}: nothing new for \d+ s\. {who}"
    assert re.match(wanted, end["text"]), end["text"]
    assert_nothing_is_left(mark)
    second = train(run, own_ray=True, **RUN | GRPO | AGAIN)
    same_steps(second.metrics, grpo.metrics)


def sent(train, name, number, when, *, everyone=False, environment=None):
    """Run, and send a signal to the driver, or to all processes as a scheduler does, as soon as `when(mark)`."""
    mark = uuid.uuid4().hex
    process = marked(mark)
    process["environment"] |= environment or {}
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(train, name, status=128 + number, **process, **RUN | GRPO)
        while not (drivers := driver_of(mark)) or not when(mark):
            assert not going.done(), going.result().output[-4000:]
            time.sleep(0.05)
        for process in processes_of(mark) if everyone else drivers:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        result = going.result()
    assert_nothing_is_left(mark)
    return result


def driver_of(mark):
    """The number of the run's first process, which leads its group."""
    drivers = []
    for number, command in processes_of(mark).items():
        with suppress(OSError):
            if os.getpgid(number) == number and "train_ppo_ray" in command:
                drivers.append(number)
    return drivers


@pytest.mark.parametrize(
    ("name", "process"), [("imports", "train_ppo_ray"), ("ray_starts", "gcs_server"), ("loading", "EngineCore")]
)
def test_before_the_first_step(train, name, process):
    def is_running(mark):
        time.sleep(0.5)
        return any(process in command for command in processes_of(mark).values())

    result = sent(train, f"signals_{name}", signal.SIGTERM, is_running)
    assert "Traceback" not in result.output
    assert result.output.splitlines()[-1].startswith("stopped by SIGTERM before the first step")


@pytest.mark.parametrize(("number", "fork"), [("SIGINT", "0"), ("SIGTERM", "0"), ("SIGHUP", "1")])
def test_a_signal_reaches_all_processes(train, workspace, number, fork):
    """Without forks, as on a machine with GPUs, and with them."""
    name = f"signals_all_{number}_{fork}"
    metrics = workspace / "runs" / name / "metrics.jsonl"
    environment, number = {"BAPO_OPENRLHF_FORK": fork}, signal.Signals[number]
    result = sent(train, name, number, lambda _: metrics.exists(), everyone=True, environment=environment)
    end = end_of(result)
    assert re.match(rf"stopped by {number.name} after step [1-5]\. It goes on with step [2-6]: ", end["text"]), end
    assert end["how"] == "stopped"

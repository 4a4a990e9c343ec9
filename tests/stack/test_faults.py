"""Faults injected into the real stack: what each does, and that the resumed run is the run that was never stopped.

docs/reliability.md lists them. In `make test`, test_resume.py kills two runs. Sampling has a seed for each response
(`--train.full_determinism_enable`), so that two runs can be compared number by number.
"""

import os
import re
import shutil
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from bapo_openrlhf.cpu.prefork import client

pytestmark = [pytest.mark.stack, pytest.mark.slow]

HERE = Path(__file__).parent
PROBE = (str(HERE / "probe.py"), "faults")
GRPO = {"algorithm": "bapo_grpo", "algo__kl__init_coef": 0.0}  # an actor and an engine: the shortest start
PPO = {"algorithm": "ba_ppo", "adapt__critic_groups": "generated"}
# v = 3 and m = 2: at steps 1, 2, 4 and 5 the engines hold delayed weights, in step 4 hard prompts are generated with
# today's weights in between. Two epochs of 3 steps.
RUN = {
    "adapt__rollout_delay": 3, "adapt__reevaluate_every": 2, "adapt__c3": ["2/8", "7/8"], "data__max_samples": 24,
    "train__num_episodes": 2, "ckpt__save_steps": 1, "train__full_determinism_enable": True,
}  # fmt: skip
AHEAD = {"train__async_enable": True}
AGAIN = {"ckpt__load_enable": True}
# How many groups are there before their step depends on how fast the engines are.
NOT_COMPARED = ("groups/in_flight",)


def marked(mark, fault=None):
    """A run whose processes can be found: those of the tests' common server would carry that one's environment."""
    more = {"FAULT": fault} if fault else {}
    return {"environment": {"MARK": mark, client.ADDRESS: ""} | more, "own_ray": True}


def processes_of(mark):
    """The command lines of the processes that carry the mark in it or in their environment, by their numbers."""
    result = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if mark.encode() in (entry / "environ").read_bytes() + command:
                result[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return result


def assert_nothing_is_left(mark):
    """All processes of the run end. After a kill -9 of the driver, Ray's agents wait a minute for its server."""
    for _ in range(150):
        left = processes_of(mark)
        if not left:
            return
        time.sleep(1)
    raise AssertionError(f"still running: {left}")


def same_steps(actual, expected):
    """The rows are equal, number by number, but for times."""
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        names = {name for name in ours | theirs if not name.startswith("timing/") and "seconds" not in name}
        pairs = {name: (ours.get(name), theirs.get(name)) for name in names.difference(NOT_COMPARED)}
        assert not {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}, ours["step"]


def error_of(result):
    return next(line for line in result.output.splitlines() if line.startswith("error: "))


class Fault(NamedTuple):
    what: str  # VICTIM/STEP/PHASE/SECONDS (fault_probe_classes.py)
    says: tuple[str, ...]  # texts in the output
    resumes_at: int  # step of the newest whole checkpoint


def stops_and_resumes(train, name, faults, run, reference):
    """Run into one fault after the other, each time from where the run stopped, and then to the end.

    Each time, this checks what the run says, that it leaves no process, and where it goes on. The numbers of all steps
    must be those of the run that was never stopped.
    """
    marks, before = [], None
    for fault in (*faults, None):
        marks.append(uuid.uuid4().hex)
        options = RUN | run | marked(marks[-1], fault and fault.what) | (AGAIN if before else {})
        result = train(name, *(PROBE if fault else ()), status=None if fault else 0, **options)
        if before:
            match = re.search(r"resuming from global_step(\d+)", result.output)
            start = int(match[1]) if match else 0
            assert match or "there is no checkpoint" in result.output, before.what
            # The workers of a driver that is gone go on until Ray has noticed: they may get a step further.
            further = start == before.resumes_at + 1 and before.what.startswith("driver")
            assert start == before.resumes_at or further, before.what
        if fault:
            assert result.status != 0, fault.what
            for text in fault.says:
                assert text in result.output, (fault.what, result.output[-4000:])
        before = fault
    same_steps(result.metrics, reference.metrics)
    assert result.summary["steps"] == 6
    for mark in marks:
        assert_nothing_is_left(mark)


def uninterrupted(train, name, run):
    result = train(name, own_ray=True, **RUN | run)
    assert all(any(row[f"groups/{name}"] for row in result.metrics) for name in ("reevaluation_attempts", "replayed"))
    return result


@pytest.fixture(scope="module")
def grpo(train):
    return uninterrupted(train, "grpo_whole", GRPO)


DIED = ("died",)  # Ray's word, in the error of the call that needed the process
# Each list is one run, which is killed and resumed once for each fault. A resume syncs weights in the step where it
# begins, so a fault in that phase comes in a later step.
KILLS = (
    (
        Fault("driver/0/training/0.05", (), 0),
        Fault("driver/2/syncing/0", (), 2),
        Fault("driver/3/making experience/0.01", (), 3),
        Fault("trainer/4/training/0.05", DIED, 4),
        Fault("driver/5/saving/0.01", (), 4),
    ),
    (
        Fault("core/2/syncing/0.02", ("step 3, syncing weights: ", *DIED), 2),
        Fault("engine/2/generating/0.05", ("step 3, generating: ", *DIED), 2),
        Fault("actor/3/training/0.05", ("step 4, training: ", *DIED), 3),
        # the engine has asked it for its weights by then, and gets no answer
        Fault("core/4/saving/5", ("step 4, saving checkpoint global_step4: ", *DIED, "vLLM's process died"), 3),
        Fault("core/4/generating hard/0.2", ("step 5, generating hard prompts again: ",), 4),
    ),
    (
        Fault("actor/1/training/0.05", ("step 2, training: ", *DIED), 1),
        Fault("engine/2/syncing/0", ("step 3, syncing weights: ", *DIED), 2),
        # not noticed before the engine is asked for its delayed weights
        Fault("engine/3/training/0", ("step 4, saving checkpoint global_step4: ", *DIED), 3),
        Fault("actor/4/saving/0.01", ("step 4, saving checkpoint global_step4: ", *DIED), 3),
        Fault("driver/4/training/0.05", (), 4),
    ),
    (
        Fault("actor/2/syncing/0", ("step 3, syncing weights: ", *DIED), 2),
        Fault("engine/2/generating hard/0.05", ("step 3, generating hard prompts again: ", *DIED), 2),
        Fault("driver/2/generating/0.05", (), 2),
        Fault("actor/3/making experience/0", ("step 4, making experience: ", *DIED), 3),
        Fault("driver/4/generating hard/0.05", (), 4),
    ),
)
KILLS_WITH_A_CRITIC = (
    Fault("reference/3/making experience/0", ("step 4, making experience: ", *DIED), 3),
    Fault("critic/3/training/0.05", ("step 4, training: ", *DIED), 3),
    Fault("critic/4/making experience/0", ("step 5, making experience: ", *DIED), 4),
    Fault("driver/4/training/0.05", (), 4),
)


@pytest.mark.parametrize("number", range(len(KILLS)))
def test_processes_killed_in_turn(train, grpo, number):
    stops_and_resumes(train, f"kills_{number}", KILLS[number], GRPO, grpo)


def test_processes_killed_in_turn_with_a_critic(train):
    ppo = uninterrupted(train, "ppo_whole", PPO)
    stops_and_resumes(train, "ppo_kills", KILLS_WITH_A_CRITIC, PPO, ppo)


def test_reward_function_that_always_fails_stops_the_run(train):
    mark = uuid.uuid4().hex
    result = train("broken", status=1, **marked(mark), **RUN | GRPO, reward__remote_url=HERE / "broken_reward.py")
    error = error_of(result)
    assert "step 1, generating: RuntimeError: 8 of 8 groups gave no reward" in error
    assert "adapt.max_failed_share is 0.5" in error and "x raised" in error
    assert re.search(r"reward_func raised RuntimeError: the verifier is not there \(.*/broken_reward\.py:6\)$", error)
    assert_nothing_is_left(mark)


@pytest.mark.parametrize(("name", "run", "says"), [
    ("actor_explodes", GRPO | {"actor__adam__lr": 1e30}, "log-probs under today's policy that are not finite"),
    ("critic_explodes", PPO | {"critic__adam__lr": 1e30}, "FloatingPointError: the loss of WholeBatch"),
])  # fmt: skip
def test_numbers_that_are_not_finite_stop_the_run(train, name, run, says):
    result = train(name, str(HERE / "any_learning_rate.py"), status=1, own_ray=True, **RUN | run)
    assert error_of(result).startswith("error: step ") and says in error_of(result)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, which is two checkpoints; grow() makes it 200."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted: {mounted.stderr.strip()}")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=200m", folder], check=True)
    subprocess.run(["umount", "-l", folder], check=True)


def test_disk_full_while_a_checkpoint_is_written(train, grpo, small_disk):
    folder, grow = small_disk
    values = RUN | GRPO | {"ckpt__path": folder / "checkpoints"}
    full = train("disk", status=1, own_ray=True, **values)
    assert "saving checkpoint global_step" in error_of(full) and shutil.disk_usage(folder).free < 2 * 2**20
    grow()
    resumed = train("disk", own_ray=True, **values | AGAIN)
    assert "was not finished: removed" in resumed.output and "resuming from global_step" in resumed.output
    same_steps(resumed.metrics, grpo.metrics)


def test_damaged_checkpoint_is_named_and_passed_over(train, grpo, workspace):
    """Of three checkpoints, the newest lost the end of a model file and the next has a flipped bit in its buffers."""
    checkpoints = workspace / "damaged" / "checkpoints"
    shutil.copytree(workspace / "grpo_whole" / "checkpoints", checkpoints)
    shutil.copytree(workspace / "runs" / "grpo_whole", workspace / "runs" / "damaged")
    kept = sorted(int(path.name.removeprefix("global_step")) for path in (checkpoints / "_adapt").iterdir())
    assert kept == [4, 5, 6]
    model = next((checkpoints / "_actor" / "global_step6").glob("*model_states.pt"))
    os.truncate(model, model.stat().st_size - 1)
    buffers = checkpoints / "_adapt" / "global_step5" / "state.safetensors"
    data = bytearray(buffers.read_bytes())
    data[len(data) // 2] ^= 1
    buffers.write_bytes(data)
    result = train("damaged", own_ray=True, **RUN | GRPO | AGAIN)
    assert f"checkpoint global_step6 is skipped: {model}" in result.output
    assert f"checkpoint global_step5 is skipped: {buffers}" in result.output
    assert "resuming from global_step4" in result.output
    same_steps(result.metrics, grpo.metrics)


def test_tensor_parallel_engine_gets_its_delayed_weights_back(train, workspace):
    """Two tensor-parallel ranks: kept, restored (step 5) and, on resume, loaded (step 4), each its own shards."""
    values = GRPO | {"vllm__tensor_parallel_size": 2}
    rows = uninterrupted(train, "tensor_parallel", values).metrics
    # In step 4 hard prompts got today's weights, fresh ones the delayed ones of step 3.
    assert all(row["tv/reevaluated"] < 0.05 for row in rows if row["groups/reevaluated"])
    assert rows[4]["staleness/rollout_policy"] == 1 and rows[5]["staleness/rollout_policy"] == 2
    checkpoints = workspace / "tensor_parallel" / "checkpoints"
    for step in (5, 6):
        for part in ("_actor", "_adapt"):
            shutil.rmtree(checkpoints / part / f"global_step{step}")
    saved = {path.name for path in (checkpoints / "_adapt" / "global_step4").glob("rollout_weights*")}
    assert saved == {"rollout_weights_rank0.safetensors", "rollout_weights_rank1.safetensors"}
    resumed = train("tensor_parallel", own_ray=True, **RUN | values | AGAIN)
    assert "resuming from global_step4" in resumed.output
    same_steps(resumed.metrics, rows)

"""A rollout engine and vLLM's process end together, and no other process ends with them."""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from test_reward_pool import exists

from bapo_openrlhf.training.engine.engine_core import ENGINE
from bapo_openrlhf.training.wire.signals import NUMBERS

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}

# A rollout engine that starts one process which has vLLM's plugin called, and one grandchild, then waits.
PARENT = """
import os, subprocess, sys, time
os.environ["{name}"] = {engine}
child = subprocess.Popen([sys.executable, "-c", '''
import time
from bapo_openrlhf.training.engine.engine_core import vllm_plugin
vllm_plugin()
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("engine", "ends"), [("str(os.getpid())", True), ('"1"', False), ('""', False)])
def test_a_process_ends_with_the_engine_that_started_it(engine, ends):
    command = [sys.executable, "-c", PARENT.format(name=ENGINE, engine=engine)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    child = int(parent.stdout.readline())
    assert exists(child)
    parent.kill()
    parent.wait()
    try:
        deadline = time.monotonic() + (60 if ends else 1)
        while exists(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert exists(child) != ends
    finally:
        if exists(child):
            os.kill(child, signal.SIGKILL)


# A rollout engine in a group with the process that it starts, which uses what vLLM's process uses.
INTERRUPTED = """
import os, subprocess, sys, time
from bapo_openrlhf.training.engine.engine_core import ENGINE
from bapo_openrlhf.training.wire.signals import leave_to_driver
os.environ[ENGINE] = str(os.getpid())
{first}
child = subprocess.Popen([sys.executable, "-c", '''
from multiprocessing import resource_tracker
from bapo_openrlhf.training.engine.engine_core import vllm_plugin
{plugin}
resource_tracker.ensure_running()
print("ready", flush=True)
input()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="", flush=True)
input()
child.communicate("\\n")
sys.exit(child.returncode)
"""


@pytest.mark.parametrize(("number", "shielded"), [*((number, True) for number in NUMBERS), (signal.SIGINT, False)])
def test_a_signal_to_the_group_ends_no_process_of_an_engine(number, shielded):
    parts = {"first": "leave_to_driver()", "plugin": "vllm_plugin()"} if shielded else {"first": "", "plugin": ""}
    parent = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(**parts)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert parent.stdout.readline() == "ready\n"
    os.killpg(parent.pid, number)
    time.sleep(0.2)
    parent.communicate("\n")
    assert (parent.returncode == 0) is shielded


# A rollout engine that does a few things after the test has seen that it is there.
ENGINE_OF = """
import atexit, sys, threading, time
from bapo_openrlhf.training.engine import engine_core
engine_core.EVERY = 0.01
dead = threading.Event()

class Engine:
    @property
    def errored(self):  # vLLM's process nearly always dies during a look at it
        return dead.wait(0.2)

def stop():
    dead.set()
    time.sleep(0.5)

{before}
engine_core.end_with(Engine())
print("is there", flush=True)
sys.stdin.readline()
{after}
"""


@pytest.mark.parametrize(("before", "after", "status", "says"), [
    # vLLM's process dies while a call waits for its answer
    ("", "stop(); threading.Event().wait()", 1, "the rollout engine ends, because vLLM's process died\n"),
    # the engine exits, and stops vLLM's process, as vLLM does it
    ("atexit.register(stop)", "", 0, ""),
])  # fmt: skip
def test_an_engine_ends_with_vllms_process_and_says_so(before, after, status, says):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", ENGINE_OF.format(before=before, after=after)]
    with subprocess.Popen(command, **pipes, text=True, env=ENVIRONMENT) as engine:
        try:
            assert engine.stdout.readline() == "is there\n"
            with pytest.raises(subprocess.TimeoutExpired):
                engine.wait(timeout=0.5)  # while vLLM is there, the engine is
            _, said = engine.communicate("\n", timeout=60)
        finally:
            engine.kill()
    assert (engine.returncode, said) == (status, says)


def test_it_is_registered_for_vllms_processes():
    result = {point.value for point in entry_points(group="vllm.general_plugins")}
    assert "bapo_openrlhf.training.engine.engine_core:vllm_plugin" in result

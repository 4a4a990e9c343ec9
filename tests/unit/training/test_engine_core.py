"""vLLM's process ends with the rollout engine that started it, and no other process does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bapo_openrlhf.training.generate.engine_core import ENGINE

# A rollout engine that starts one process which has vLLM's plugin called, and one grandchild, then waits.
PARENT = """
import os, subprocess, sys, time
os.environ["{name}"] = {engine}
child = subprocess.Popen([sys.executable, "-c", '''
import time
from bapo_openrlhf.training.generate.engine_core import vllm_plugin
vllm_plugin()
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("engine", "ends"), [("str(os.getpid())", True), ('"1"', False), ('""', False)])
def test_a_process_ends_with_the_engine_that_started_it(engine, ends):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(name=ENGINE, engine=engine)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        deadline = time.monotonic() + (60 if ends else 1)
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(child) != ends
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


def test_it_is_registered_for_vllms_processes():
    from importlib.metadata import entry_points

    result = {point.value for point in entry_points(group="vllm.general_plugins")}
    assert "bapo_openrlhf.training.generate.engine_core:vllm_plugin" in result

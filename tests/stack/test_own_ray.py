"""A Ray that a run starts: who may join it, and what a signal to all of its processes does."""

import json
import os
import subprocess
import sys

import pytest

from bapo_openrlhf.training.driver.own_ray import MODE, TOKEN
from bapo_openrlhf.training.wire.signals import NUMBERS

pytestmark = pytest.mark.stack

# A driver whose home folder cannot be written. It says its address and token, sends signals to all other processes, and
# then runs a task.
DRIVER = f"""
import json, os, pathlib, sys, time
import ray
from bapo_openrlhf.training.driver.own_ray import connect, token
context = connect("local", num_cpus=1, include_dashboard=False, logging_level="error")
print(json.dumps({{"address": context.address_info["gcs_address"], **token()}}), flush=True)
sys.stdin.readline()
task = ray.remote(lambda: os.environ["{MODE}"])
ray.get(task.remote())
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        of_ray = int(entry.name) != os.getpid() and b"MARK=own" in (entry / "environ").read_bytes()
        for number in {[int(number) for number in NUMBERS]} if of_ray else ():
            os.kill(int(entry.name), number)
    except OSError:
        pass
time.sleep(2)
print(ray.get(task.remote()), flush=True)
"""
STRANGER = """
import sys
import ray
ray.init(address=sys.argv[1], logging_level="error")
print("joined", ray.get(ray.remote(lambda: 1).remote()))
"""


def said_by(process, seconds):
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def test_a_stranger_is_refused_and_signals_end_nothing():
    """Whoever is refused tries again for half a minute, and is not waited for."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = plain | {"HOME": "/proc", "MARK": "own"}
    words, pipes = [sys.executable, "-c", DRIVER], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, text=True, **pipes) as driver:
        told = json.loads(driver.stdout.readline())
        joining = {}
        for who, has in {"self": told[TOKEN], "nobody": None, "stranger": "s" * 64}.items():
            more = {MODE: "token", TOKEN: has} if has else {}
            words = [sys.executable, "-c", STRANGER, told["address"]]
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            joining[who] = subprocess.Popen(words, env=plain | more, **output)
        joined = {who: said_by(process, None if who == "self" else 5) for who, process in joining.items()}
        said, _ = driver.communicate("\n", timeout=120)
    assert joined == {"nobody": "", "stranger": "", "self": "joined 1\n"}
    assert (said, driver.returncode) == ("token\n", 0)

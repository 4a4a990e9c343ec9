"""benchmarks/gpu_training.py on the CPU, in an environment where neither Ray nor vLLM can be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
HIDING = ROOT / "tests" / "without_ray"  # its sitecustomize.py


def test_a_step_without_ray_and_vllm():
    """All models train in every variant, and log-probs in tiles are those of all positions."""
    places = os.pathsep.join([str(HIDING), str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, str(ROOT / "benchmarks" / "gpu_training.py"), "--dry-run"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^\| (BAPO-GRPO|BA-PPO), ([\w ]+) \|.*\| (\S+) \|$", done.stdout, re.MULTILINE)
    variants = ["as a run computes it", "logits of all positions", "activations kept"]
    assert [row[:2] for row in rows] == [(kind, name) for kind in ("BAPO-GRPO", "BA-PPO") for name in variants]
    differs = {name: float(number) for _, name, number in rows}
    assert differs["as a run computes it"] == differs["activations kept"] == 0
    assert differs["logits of all positions"] < 1e-3

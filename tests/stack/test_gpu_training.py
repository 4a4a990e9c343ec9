"""benchmarks/gpu_training.py on the CPU, in an environment where neither Ray nor vLLM can be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]
# Runs the script as if nobody had installed them. Only this process and its children see it.
HIDING = """
import sys
from importlib.machinery import PathFinder

class Hides:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {"ray", "vllm"} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hides
"""


def test_a_step_without_ray_and_vllm(tmp_path):
    """All models train in every variant, and log-probs in tiles are those of all positions."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    places = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, str(ROOT / "benchmarks" / "gpu_training.py"), "--dry-run"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^\| (BAPO-GRPO|BA-PPO), ([\w ]+) \|.*\| (\S+) \|$", done.stdout, re.MULTILINE)
    variants = ["as a run computes it", "logits of all positions", "activations kept"]
    assert [row[:2] for row in rows] == [(kind, name) for kind in ("BAPO-GRPO", "BA-PPO") for name in variants]
    differs = {name: float(number) for _, name, number in rows}
    assert differs["as a run computes it"] == differs["activations kept"] == 0
    assert differs["logits of all positions"] < 1e-3

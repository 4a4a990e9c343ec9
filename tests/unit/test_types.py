"""Types of the pure layer hold, strictly. The same as `mypy` in the project's folder, which `make lint` runs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = {"adapt", "methods", "errors.py"}  # CONTRIBUTING.md, the lowest rows


@pytest.mark.slow
def test_pure_layer_is_typed(tmp_path):
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_of_the_pure_layer_is_checked():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] is True
    assert {f"bapo_openrlhf/{name}" for name in PURE} <= set(settings["files"])
    assert all((ROOT / name).exists() for name in settings["files"])

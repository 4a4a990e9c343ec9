"""gpu.py on the CPU: all kinds of runs, the floor and OpenRLHF itself on the real stack, in one Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_a_dry_run_measures_everything(tmp_path):
    words = [sys.executable, str(ROOT / "research" / "benchmarks" / "gpu.py"), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [run["kind"] for run in result["runs"]] == ["bapo_grpo", "openrlhf_grpo", "ba_ppo"] and not result["not_run"]
    for run in result["runs"]:
        assert (run["measured"], run["missing"]) == (2, "")
        assert all(run["numbers"][part] > 0 for part in ("generation", "make_experience", "ppo_train", "mfu"))
    parts = {"generation", "forward", "training", "weights", "mfu"}
    assert len(result["floors"]) == 3 and all(set(floor) == parts for floor in result["floors"].values())
    page = (tmp_path / "gpu.md").read_text()
    assert "**Dry run: no GPU.**" in page and "| in no part slower than OpenRLHF itself |" in page

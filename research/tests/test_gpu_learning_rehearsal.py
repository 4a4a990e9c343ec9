"""gpu_learning.py on the CPU: every part on the real stack, in one Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_a_dry_run_has_all_parts(tmp_path):
    script = ROOT / "research" / "benchmarks" / "gpu_learning.py"
    words = [sys.executable, str(script), "--dry-run", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "out" / "gpu_learning.json").read_text())
    parts = result["parts"]
    assert list(parts) == ["before", "grpo", "bapo_grpo", "ba_ppo", "bits_1", "bits_2"]
    assert not [part["missing"] for part in parts.values() if part["missing"]]
    for name, part in parts.items():
        evaluated = [row["step"] for row in part["rows"] if "evaluation" in row]
        assert evaluated == ([0] if name == "before" else [1, 2]), name
        assert len(part["rows"]) - len(evaluated) == part["steps"] == (0 if name == "before" else 2)
    assert result["bits"] == {"steps": 2, "differences": []}  # as on any CPU

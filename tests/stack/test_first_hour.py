"""A new user's first hour, from files to an evaluation, with the commands of examples/first_hour.sh."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_openrlhf.cpu.prefork.serving import python
from bapo_openrlhf.record.run_record import read_metrics, read_summary

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]


def test_the_first_hour(tmp_path):
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "bapo-openrlhf"  # this copy's, also if another copy is installed
    command.write_text(f'#!/bin/sh\nexec {python()} -m bapo_openrlhf.cli "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    folder = tmp_path / "hour"
    done = subprocess.run(
        [shutil.which("bash"), ROOT / "examples" / "first_hour.sh", folder, "--installed"],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = folder / "my_task" / "runs" / "first"
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 9))  # 32 problems, 8 a step, twice
    assert read_summary(run)["seconds"]["whole_run"] > 0 and (run / "model" / "config.json").is_file()
    for words in ("configuration is valid", "fits on 1 4090", "passed in ", "8/8 steps", "first: "):
        assert words in done.stdout, words
    assert "<html" in (folder / "report.html").read_text()
    (settings,) = folder.glob("evaluated/**/settings.json")
    assert json.loads(settings.read_text())["sampling"]["runs"] == 2

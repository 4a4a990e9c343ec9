"""A run of continuous integration fails if a test is skipped for a reason that tests/conftest.py does not allow."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SKIPS = {
    "by a mark": "@pytest.mark.skipif(True, reason={reason!r})\ndef test_it():\n    pass\n",
    "in a fixture": "@pytest.fixture\ndef it():\n    pytest.skip({reason!r})\n\ndef test_it(it):\n    pass\n",
    "in a test": "def test_it():\n    pytest.skip({reason!r})\n",
    "of a file": "pytest.skip({reason!r}, allow_module_level=True)\n",
}
PASSES = "def test_more():\n    pass\n"


@pytest.fixture
def run(tmp_path):
    """Runs these files as continuous integration does, in so many processes."""
    shutil.copy(TESTS / "conftest.py", tmp_path)

    def run(files, processes=0):
        for number, text in enumerate(files):
            (tmp_path / f"test_{number}.py").write_text(f"import pytest\n\n{text}")
        words = ["-c", TESTS.parent / "pyproject.toml", "-p", "no:cacheprovider", "-n", str(processes), tmp_path]
        words += ["--continue-on-collection-errors"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], env=environment | {"CI": "true"}, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_unexpected_skips_fail(run, processes):
    files = [*(text.format(reason=f"no browser {how}") for how, text in SKIPS.items()), PASSES]
    status, output = run(files, processes)
    assert status and "skipped" not in output.splitlines()[-1] and "1 passed" in output.splitlines()[-1]
    for how in SKIPS:
        assert f"unexpected skip, which tests/conftest.py does not allow: no browser {how}\n" in output

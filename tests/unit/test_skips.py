"""A run of continuous integration fails if a test is skipped for a reason that tests/conftest.py does not allow."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = [
    "def test_it():\n    pytest.skip('no browser in a test')\n",
    "pytest.skip('no browser of a file', allow_module_level=True)\n",
    "def test_more():\n    pass\n",
]


def test_unexpected_skips_fail(tmp_path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for number, text in enumerate(FILES):
        (tmp_path / f"test_{number}.py").write_text(f"import pytest\n\n{text}")
    words = ["-c", TESTS.parent / "pyproject.toml", "-p", "no:cacheprovider", "-n", "0", tmp_path]
    words += ["--continue-on-collection-errors"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"CI": "true"}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], env=environment, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1]
    assert done.returncode and "skipped" not in last and "1 passed" in last
    for how in ("in a test", "of a file"):
        assert f"unexpected skip, which tests/conftest.py does not allow: no browser {how}\n" in done.stdout

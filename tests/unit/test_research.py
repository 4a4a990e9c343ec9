"""Every script of research/ starts: it can be imported, and its parser knows what it says of itself.

`make test-research` tests what the scripts compute. So a name that does not exist any more is found here, and not after
hours of a study.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "research").glob("*.py"), *(ROOT / "research" / "benchmarks").glob("*.py")]
SCRIPTS = sorted(path for path in FILES if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))
# They have no parser: other scripts start them with a file, or they always do the same. They are only imported.
NO_PARSER = {
    "adaptation_storage.py", "gpu_floor.py", "hard_prompts.py", "hard_sums.py", "mixed_sums.py", "partial_sums.py",
    "replay_probe.py", "study_picture.py", "trl_grpo.py",
}  # fmt: skip
# What each gave, as JSON; one process for all, because many import the same heavy packages.
START = """
import contextlib, io, json, runpy, sys
found = {}
for path, parser in json.loads(sys.argv[1]):
    sys.argv, out = [path, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__" if parser else "imported")
        found[path] = "" if not parser else "it went on after --help"
    except SystemExit as exit:
        found[path] = "" if exit.code == 0 and out.getvalue().startswith("usage: ") else f"status {exit.code}"
    except BaseException as error:
        found[path] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def errors_by_script():
    """What went wrong with each script, by its path: "" if nothing did."""
    wanted = json.dumps([(str(path), path.name not in NO_PARSER) for path in SCRIPTS])
    folders = ":".join(str(ROOT / folder) for folder in ("", "research", "research/benchmarks"))
    environment = {"PYTHONPATH": folders, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    words = [sys.executable, "-c", START, wanted]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_starts(errors_by_script, path):
    """TRL is not installed here; its script needs nothing else that is missing."""
    allowed = ("ModuleNotFoundError: No module named 'trl'",) if path.name == "trl_grpo.py" else ()
    assert errors_by_script[str(path)] in ("", *allowed)

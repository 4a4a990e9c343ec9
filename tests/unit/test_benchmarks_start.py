"""Every script in benchmarks/ starts: it can be imported, and its parser knows what it says of itself.

So a name that does not exist any more is found here, and not after hours of `make bench`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def scripts(folder):
    return sorted(path for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))


SCRIPTS = scripts(ROOT / "benchmarks")
# They have no parser: other scripts start them with a file, or they always do the same. They are only imported.
NO_PARSER = {
    "adaptation_storage.py", "floor_replay.py", "gpu_floor.py", "processor_seconds.py", "trl_grpo.py",
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


def start(paths, no_parser):
    """What went wrong with each script of a folder, by its name: "" if nothing did."""
    wanted, folder = json.dumps([(str(path), path.name not in no_parser) for path in paths]), paths[0].parent
    environment = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(
        [sys.executable, "-c", START, wanted], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {Path(path).name: what for path, what in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def started():
    return start(SCRIPTS, NO_PARSER)


@pytest.mark.parametrize("name", [path.name for path in SCRIPTS])
def test_starts(started, name):
    """TRL is not installed here; its script needs nothing else that is missing."""
    allowed = ("ModuleNotFoundError: No module named 'trl'",) if name == "trl_grpo.py" else ()
    assert started[name] in ("", *allowed)


def test_make_bench_names_scripts_that_are_there():
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    named = re.findall(r"benchmarks/(\S+)", recipe)
    assert len(named) > 5 and set(named) <= {path.name for path in SCRIPTS}
    assert len(named) == len(set(named))

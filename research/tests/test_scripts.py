"""Every script in research/ starts: it can be imported, and its parser knows what it says of itself."""

import pytest
from folders import ROOT

from bapo_openrlhf import user_file

starts = user_file.load("starts", ROOT / "tests" / "unit" / "test_benchmarks_start.py")
SCRIPTS = starts.scripts(ROOT / "research")
NO_PARSER = {  # they are only imported
    "hard_prompts.py", "hard_sums.py", "mixed_sums.py", "partial_sums.py", "replay_probe.py", "study_picture.py"
}  # fmt: skip


@pytest.fixture(scope="module")
def started():
    return starts.start(SCRIPTS, NO_PARSER)


@pytest.mark.parametrize("name", [path.name for path in SCRIPTS])
def test_starts(started, name):
    assert started[name] == ""

"""Commands on an installation without an extra."""

import subprocess
import sys

import pytest

RUN = "import sys; sys.modules[{!r}] = None; from bapo_openrlhf.cli import main; sys.exit(main.run({}))"
# The message of pandas, whose error has no name of a module.
MARKDOWN = """
import sys
sys.modules["tabulate"] = None
from bapo_openrlhf.cli import main
from bapo_openrlhf.workbench.pages.table import Table
try:
    Table.of(["a"], [[1]]).markdown()
except ImportError as error:
    print(main.remedy(error), file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.parametrize(("code", "lacks", "remedy"), [
    (RUN.format("pandas", ["report", "x"]), "pandas", "'.[pages]'"),
    (RUN.format("scipy", ["study", "--config", "x", "--check"]), "scipy", "`make`"),
    (MARKDOWN, "tabulate", "'.[pages]'"),
    (RUN.format("bapo_openrlhf.adapt", ["methods"]), "Traceback", ""),  # nothing here installs it
])  # fmt: skip
def test_a_command_says_in_one_line_what_to_install(code, lacks, remedy):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert lacks in lines[0] and remedy in lines[0]
    assert (done.returncode, len(lines)) == (2, 1) or not remedy

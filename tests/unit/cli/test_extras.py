"""Commands on an installation without an extra."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "lacks", "remedy"),
    [
        (["report", "x"], "pandas", "'.[pages]'"),
        (["report", "x"], "altair", "'.[pages]'"),
        (["prepare", "math"], "pandas", "'.[pages]'"),
        (["study", "--config", "x", "--check"], "scipy", "`make`"),
    ],
)
def test_a_command_says_in_one_line_what_to_install(words, lacks, remedy):
    code = f"import sys; sys.modules[{lacks!r}] = None; from bapo_openrlhf.cli import main; sys.exit(main.run({words}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and lacks in line and remedy in line


def test_tables_as_markdown_need_tabulate():
    code = (
        "import sys; sys.modules['tabulate'] = None\n"
        "from bapo_openrlhf.cli import main; from bapo_openrlhf.workbench.pages.table import Table\n"
        "try:\n    Table.of(['a'], [[1]]).markdown()\n"
        "except ImportError as error:\n    print(main.remedy(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "tabulate" in done.stdout and "'.[pages]'" in done.stdout


def test_what_nothing_here_installs_is_an_error_of_its_own():
    code = (
        "import sys; sys.modules['bapo_openrlhf.adapt'] = None\n"
        "from bapo_openrlhf.cli import main; sys.exit(main.run(['methods']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Traceback" in done.stderr

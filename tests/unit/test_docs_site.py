"""The documentation builds as a site, without a warning: every page is in the side bar, every link leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_has_every_page_and_loads_nothing_from_elsewhere(tmp_path):
    """Built as `make docs` does. Pages work without a network: no font, script or picture of another host."""
    flags = re.search(r"sphinx (.*) docs/_build", (ROOT / "Makefile").read_text())[1].split()
    assert {"-W", "--keep-going"} <= set(flags)
    command = [sys.executable, "-m", "sphinx", *flags, tmp_path / "site", "-d", tmp_path / "doctrees"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = (".", "docs", "examples/trl", "research/benchmarks/results", "research", "research/results")
    for page in (path for folder in folders for path in (ROOT / folder).glob("*.md")):
        assert (tmp_path / "site" / page.relative_to(ROOT)).with_suffix(".html").is_file(), page
    assert "README.html" in (tmp_path / "site" / "index.html").read_text()
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [address for address in loaded if "://" in address], page

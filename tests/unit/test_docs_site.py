"""The documentation builds as a site, without a warning: every page is in the side bar, every link leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does."""
    out = tmp_path_factory.mktemp("site")
    flags = re.search(r"sphinx (.*) docs/_build", (ROOT / "Makefile").read_text())[1].split()
    assert {"-W", "--keep-going"} <= set(flags)
    command = [sys.executable, "-m", "sphinx", *flags, out, "-d", tmp_path_factory.mktemp("doctrees")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_there(site):
    folders = (".", "docs", "examples/trl", "research/benchmarks/results", "research", "research/results")
    pages = [path for folder in folders for path in (ROOT / folder).glob("*.md")]
    for page in pages:
        assert (site / page.relative_to(ROOT)).with_suffix(".html").is_file(), page
    assert "README.html" in (site / "index.html").read_text()


def test_nothing_is_loaded_from_elsewhere(site):
    """Pages work without a network: no font, script or picture of another host."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [address for address in loaded if "://" in address], page

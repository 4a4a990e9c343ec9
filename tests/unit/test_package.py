"""What gets into the wheel; a release is made of one version only."""

import runpy
import tomllib
from pathlib import Path

import pytest

import bapo_openrlhf

ROOT = Path(__file__).parents[2]
check_tag = runpy.run_path(str(ROOT / "tools" / "check_tag.py"))["check"]


def test_every_file_of_the_package_gets_into_the_wheel():
    """Python files of packages, and what pyproject.toml names. A release builds one and tries it."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == ["bapo_openrlhf*"]
    globs = [(ROOT / part.replace(".", "/"), one) for part, all_ in setuptools["package-data"].items() for one in all_]
    named = {path for folder, glob in globs for path in folder.glob(glob)}
    files = [path for path in (ROOT / "bapo_openrlhf").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        assert path in named or (path.suffix == ".py" and (path.parent / "__init__.py").is_file()), path


CHANGELOG = "# Changelog\n\nwords\n\n## 0.2.0, 2026-02-01\n\n### Added\n- new\n\n## 0.1.0, 2026-01-01\n- old\n"


@pytest.mark.parametrize(("tag", "version", "changelog", "says"), [
    ("0.2.0", "0.2.0", CHANGELOG, "tag is 0.2.0"),
    ("v0.3.0", "0.3.0", CHANGELOG, "CHANGELOG.md is 0.2.0"),
    ("v0.2.0", "0.2.0", CHANGELOG.replace("2026-02-01", "not released yet"), "'not released yet'"),
    ("v0.2.0", "0.2.0", "# Changelog\n", "no entry"),
])  # fmt: skip
def test_tag_that_does_not_fit(tag, version, changelog, says):
    assert check_tag("v0.2.0", "0.2.0", CHANGELOG) == "### Added\n- new"
    with pytest.raises(ValueError, match=says):
        check_tag(tag, version, changelog)


def test_newest_entry_is_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    head = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert head.removeprefix("## ").split(", ")[0] == bapo_openrlhf.__version__

"""The wheel installs and runs in a fresh environment; a release is made of one version only; habits of the forge."""

import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import bapo_openrlhf

ROOT = Path(__file__).parents[2]
check_tag = runpy.run_path(str(ROOT / "tools" / "check_tag.py"))["check"]
wheel_tool = runpy.run_path(str(ROOT / "tools" / "check_wheel.py"))


@pytest.mark.slow
def test_wheel_works_in_a_fresh_environment(tmp_path):
    command = [sys.executable, ROOT / "tools" / "check_wheel.py", tmp_path / "dist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("checked") == 2
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    version = bapo_openrlhf.__version__
    assert names == [f"bapo_openrlhf-{version}-py3-none-any.whl", f"bapo_openrlhf-{version}.tar.gz"]


def test_every_file_of_the_package_gets_into_the_wheel():
    """Python files of packages, and what pyproject.toml names. A wheel itself is built by the slow test above."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == ["bapo_openrlhf*"]
    data = setuptools["package-data"]
    named = {
        path for part, globs in data.items() for glob in globs for path in (ROOT / part.replace(".", "/")).glob(glob)
    }
    files = [path for path in (ROOT / "bapo_openrlhf").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        is_module = path.suffix == ".py" and (path.parent / "__init__.py").is_file()
        assert is_module or path in named, path


class TestWhatIsInside:
    """The checks see what they are for, on archives made by hand."""

    @pytest.fixture
    def source(self, tmp_path):
        folder = tmp_path / "source"
        (folder / "bapo_openrlhf").mkdir(parents=True)
        (folder / "bapo_openrlhf" / "__init__.py").write_text("")
        (folder / "bapo_openrlhf" / "page.html").write_text("")
        for name in wheel_tool["IN_SDIST"]:
            (folder / name).write_text("")
        return folder

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ((), None),
            (("-bapo_openrlhf/page.html",), "lacks ['bapo_openrlhf/page.html']"),
            (("+tests/test_x.py",), "has ['tests/test_x.py']"),
        ],
    )
    def test_wheel(self, tmp_path, source, change, says):
        names = {"bapo_openrlhf/__init__.py", "bapo_openrlhf/page.html", "bapo_openrlhf-1.dist-info/METADATA"}
        self.changed(names, change)
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
            for name in names:
                archive.writestr(name, "")
        self.checked("check_wheel", tmp_path / "x.whl", source, says)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ((), None),
            (("-configs",), "lacks ['configs']"),
            (("+runs/x/metrics.jsonl", "+data/math/train.jsonl"), "has ['data/math/train.jsonl', 'runs/x/metrics"),
            (("+research/README.md",), "has ['research/README.md']"),
        ],
    )
    def test_sdist(self, tmp_path, source, change, says):
        names = {"PKG-INFO", "bapo_openrlhf/__init__.py", "bapo_openrlhf/page.html", *wheel_tool["IN_SDIST"]}
        self.changed(names, change)
        with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
            for name in names:
                archive.add(source / "LICENSE", arcname=f"bapo_openrlhf-1/{name}")
        self.checked("check_sdist", tmp_path / "x.tar.gz", source, says)

    @staticmethod
    def changed(names, change):
        for word in change:
            (names.discard if word[0] == "-" else names.add)(word[1:])

    @staticmethod
    def checked(name, archive, source, says):
        if says is None:
            wheel_tool[name](archive, source)
            return
        with pytest.raises(SystemExit) as error:
            wheel_tool[name](archive, source)
        assert says in str(error.value)


# ── Releases ──

CHANGELOG = "# Changelog\n\nwords\n\n## 0.2.0, 2026-02-01\n\n### Added\n- new\n\n## 0.1.0, 2026-01-01\n- old\n"


def test_tag_that_fits():
    assert check_tag("v0.2.0", "0.2.0", CHANGELOG) == "### Added\n- new"


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "says"),
    [
        ("v0.1.0", "0.2.0", CHANGELOG, "tag is v0.1.0; bapo_openrlhf.__version__ is 0.2.0, so it must be v0.2.0"),
        ("0.2.0", "0.2.0", CHANGELOG, "tag is 0.2.0"),
        ("v0.1.0", "0.1.0", CHANGELOG, "the newest entry of CHANGELOG.md is 0.2.0; it must be 0.1.0"),
        ("v0.3.0", "0.3.0", CHANGELOG, "the newest entry of CHANGELOG.md is 0.2.0; it must be 0.3.0"),
        ("v0.2.0", "0.2.0", CHANGELOG.replace("2026-02-01", "not released yet"), "'not released yet' where its date"),
        ("v0.2.0", "0.2.0", "# Changelog\n", "no entry"),
    ],
)
def test_tag_that_does_not_fit(tag, version, changelog, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        check_tag(tag, version, changelog)


def test_newest_entry_is_of_this_version():
    """What the next release needs, but for its date."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    head = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert head.removeprefix("## ").split(", ")[0] == bapo_openrlhf.__version__


# ── The forge's files ──


def commands_of(workflow):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
    return "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])


def test_workflows_run_what_is_there():
    assert ".ci/run" in commands_of("ci") and "make lint" in commands_of("ci")
    assert "make test-research" in commands_of("research") and "make test-research" in commands_of("release")
    assert "make docs" in commands_of("pages")
    release = commands_of("release")
    assert release.index("tools/check_tag.py") < release.index("tools/check_wheel.py dist") < release.index("dist/*")
    trigger = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())[True]  # YAML 1.1's "on"
    assert trigger == {"push": {"tags": ["v*"]}}


def test_hooks_are_the_linters_of_the_project():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]  # installed tools: no download
    entries = {hook["entry"].split()[0] for hook in hooks[0]["hooks"]}
    assert entries == {"ruff", "mypy"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert entries <= set(extras["test"]) and all(
        shutil.which(name, path=Path(sys.executable).parent) for name in entries
    )


def test_issue_forms_ask_for_what_helps():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert {"bug", "feature", "method"} <= set(forms)
    for name in ("bug", "feature", "method"):
        assert forms[name]["name"] and forms[name]["description"]
        fields = [field for field in forms[name]["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) >= 2
    bug = " ".join(str(field["attributes"]) for field in forms["bug"]["body"])
    assert all(word in bug for word in ("run.json", "ommand", "ersions", "log"))


def test_the_citation_is_that_of_the_readme():
    """The paper in CITATION.cff and in the bibtex of README. Software, licence and authors are those of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    [paper] = citation["references"]
    bibtex = (ROOT / "README.md").read_text().split("```bibtex\n")[1].split("```")[0]
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    for words in (paper["title"], names, str(paper["year"]), paper["journal"]):
        assert "{" + words + "}" in bibtex
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert citation["title"].startswith("bapo_openrlhf: ")

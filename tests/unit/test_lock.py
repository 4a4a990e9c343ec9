"""The lock files have a version of everything that `make` and `make install-gpu` install, and both commands use it."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("cpu", "test", "reasoning-gym"), "cuda": ("cuda",)}
TARGETS = {"cpu": ".venv/.installed", "cuda": ".venv-gpu/.installed"}


def lines_of(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def lock_of(name):
    """The locked version of each package. A line that is not only a name and a version is an error."""
    pairs = [re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==([0-9][a-z0-9.]*)", line) for line in lines_of(f"{name}.lock")]
    assert all(pairs), lines_of(f"{name}.lock")[pairs.index(None)]
    return dict(pair.groups() for pair in pairs)


def asked_for(lines, extras=("",)):
    """Requirements that hold on this machine, with those of the extras that they name."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            if requirement.name == "bapo_openrlhf":
                for extra in requirement.extras:
                    yield from asked_for(PROJECT["optional-dependencies"][extra])
            else:
                yield requirement


def directly(name):
    lines = [line for extra in EXTRAS[name] for line in PROJECT["optional-dependencies"][extra]]
    return list(asked_for(PROJECT["dependencies"] + lines))


@pytest.mark.parametrize("name", EXTRAS)
def test_every_requirement_of_the_project_is_locked(name):
    lock, wanted = lock_of(name), directly(name)
    assert len(wanted) > 30
    for requirement in wanted:
        version = lock.get(canonicalize_name(requirement.name))
        assert version, f"{requirement} is not in requirements/{name}.lock.txt: run `make lock`"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}, but {version} is locked"


@pytest.mark.parametrize("name", EXTRAS)
def test_what_is_installed_without_dependencies_is_locked(name):
    lock = lock_of(name)
    assert {tuple(line.split("==")) for line in lines_of(f"{name}-no-deps")} <= set(lock.items())
    assert "flash-attn" not in lock  # nothing that has to be compiled


@pytest.mark.parametrize("name", EXTRAS)
def test_what_requirements_require_is_locked(name):
    """By the metadata of the installed packages. Packages that are not installed here are not looked into."""
    lock, todo, seen = lock_of(name), directly(name), set()
    while todo:
        requirement = todo.pop()
        package = canonicalize_name(requirement.name)
        known = {(package, extra) for extra in ("", *requirement.extras)}
        if known <= seen:
            continue
        seen |= known
        assert package in lock, f"{requirement.name} is not in requirements/{name}.lock.txt: run `make lock`"
        try:
            result = importlib.metadata.requires(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += asked_for(result or [], ("", *requirement.extras))
    assert len(seen) > 100


@pytest.mark.parametrize("name", EXTRAS)
def test_make_installs_again_only_if_the_lock_has_changed(name, tmp_path):
    places = [ROOT / name for name in ("Makefile", "pyproject.toml", "requirements", "tools")]
    subprocess.run(["cp", "-r", *places, tmp_path], check=True)
    target, lock = tmp_path / TARGETS[name], tmp_path / "requirements" / f"{name}.lock.txt"
    target.parent.mkdir()
    target.touch()

    def make(*options):
        return subprocess.run(["make", *options, TARGETS[name]], cwd=tmp_path, capture_output=True, text=True)

    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
    assert make("-q").returncode == 0
    os.utime(lock, (2, 2))
    assert make("-q").returncode == 1
    installs = {"cpu": "tools/install.sh .venv", "cuda": '--constraint requirements/cuda.lock.txt --editable ".[cuda]"'}
    assert installs[name] in make("-n").stdout


PIP = r"""#!/bin/sh
echo "pip $*" >> "$LOG"
[ "$*" != "config list" ] || printf '%s\n' ":env:.find-links='/wheels'" "global.cert='/certificates.pem'" \
    "global.extra-index-url='file:///one\nfile:///two file:///three'"
"""
UV = r"""#!/bin/sh
echo "uv $SSL_CERT_FILE $*" >> "$LOG"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


@pytest.mark.parametrize(
    ("fails", "falls_back"),
    [("nothing", False), ("--editable .[cpu,test]", True), ("--no-deps", True), ("reasoning-gym", False)],
)
def test_uv_installs_from_where_pip_would_and_pip_if_uv_cannot(tmp_path, fails, falls_back):
    (tmp_path / "bin").mkdir()
    for name, text in (("pip", PIP), ("uv", UV)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {"LOG": str(tmp_path / "log"), "FAILS": fails}
    subprocess.run([ROOT / "tools" / "install.sh", tmp_path], cwd=ROOT, env=environment, check=True)
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line != "pip config list"]
    locked, no_deps = "--constraint requirements/cpu.lock.txt", "--no-deps --requirement requirements/cpu-no-deps.txt"
    parts = [f"{locked} --editable .[cpu,test]", no_deps, f"{locked} --editable .[reasoning-gym]"]
    places = "--index file:///one --index file:///two --index file:///three --find-links /wheels"
    flags = f"--quiet --python {tmp_path}/bin/python --index-strategy unsafe-best-match {places}"
    tried = [f"uv /certificates.pem pip install {flags} {what}" for what in parts]
    by_pip = [f"pip install --quiet --no-compile {what}" for what in parts]
    tried = tried[: {"--editable .[cpu,test]": 1, "--no-deps": 2}.get(fails, 3)]
    assert lines == ["pip install --quiet --no-compile uv", *tried, *(by_pip if falls_back else [])]

"""Builds the sdist and the wheel, and uses the wheel in a fresh environment: `python tools/check_wheel.py [OUT]`.

It needs no network: the installed setuptools builds, and the fresh environment uses this one's packages as its
dependencies. It checks that the wheel has every file of the package and nothing else, that the sdist has what a study
needs but no run and no data, and that commands and modules of the wheel work in another folder.

If OUT is given, both files are left there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "dist", "runs", "_build"
)  # what a project's folder may contain and the copy does not need
IN_SDIST = ("Makefile", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "requirements",
            "configs", "examples", "docs", "tests", "tools")  # fmt: skip

USE = """
import importlib, importlib.metadata, pathlib, pkgutil, sys
import bapo_openrlhf
folder = pathlib.Path(bapo_openrlhf.__file__).parent
assert pathlib.Path(sys.prefix) in folder.parents, f"{folder} is not the wheel's"
names = ["bapo_openrlhf." + name for name in ("adapt.arithmetic", "flags.config", "errors", "cli.main")]
for part in ("adapt", "methods"):
    package = importlib.import_module("bapo_openrlhf." + part)
    names += [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
about = importlib.metadata.distribution("bapo_openrlhf")
assert about.version == bapo_openrlhf.__version__
groups = {entry.group for entry in about.entry_points}
assert groups == {"console_scripts", "vllm.general_plugins"}, groups
print(len(names), "modules of the pure layer")
"""


def main() -> int:
    """Build, check, use."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = work / "source"
        copy_source(source)
        sdist, wheel = build(source, "sdist", work), build(source, "wheel", work)
        check_wheel(wheel, source)
        check_sdist(sdist, source)
        use(wheel, work / "venv", work / "elsewhere")
        for path in (sdist, wheel):
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, checked")
            if len(sys.argv) > 1:
                Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, sys.argv[1])
    return 0


def copy_source(source: Path) -> None:
    """Copy the project's folder without what builds, runs and editors left: an old build/ would get into a wheel."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        top = {"build", "data"} if Path(folder) == ROOT else set()  # inside bapo_openrlhf these names are source
        return NOT_SOURCE(folder, names) | top

    shutil.copytree(ROOT, source, ignore=left_out)


def build(source: Path, kind: str, out: Path) -> Path:
    """Build an sdist or a wheel with the installed setuptools."""
    code = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
    run([sys.executable, "-c", code, str(out)], source)
    return next(out.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind]))


def files_of(folder: Path, root: Path) -> set[str]:
    """Paths of the files of a folder, relative to `root`."""
    return {str(path.relative_to(root)) for path in folder.rglob("*") if path.is_file()}


def check_wheel(wheel: Path, source: Path) -> None:
    """Check that the wheel has every file of the package, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    same("the wheel", names, files_of(source / "bapo_openrlhf", source))


def check_sdist(sdist: Path, source: Path) -> None:
    """Check that the sdist has the project's files, and nothing else."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    names = {name for name in names if ".egg-info/" not in name} - {"PKG-INFO", "setup.cfg", "MANIFEST.in"}
    wanted = files_of(source / "bapo_openrlhf", source)
    for name in IN_SDIST:
        wanted |= files_of(source / name, source) if (source / name).is_dir() else {name}
    same("the sdist", names, wanted)


def same(what: str, actual: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise a SystemExit that names what is missing and what should not be there, if there is any."""
    missing, extra = sorted(set(wanted) - set(actual)), sorted(set(actual) - set(wanted))
    if missing or extra:
        raise SystemExit(f"{what} lacks {missing} and has {extra}, which it should not")


def use(wheel: Path, venv: Path, elsewhere: Path) -> None:
    """Install the wheel into a new environment and run it in a folder that is not the project's."""
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], ROOT)
    python, program = venv / "bin" / "python", venv / "bin" / "bapo-openrlhf"
    flags = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "--python", str(python), "install", *flags, str(wheel)], ROOT)
    # This environment's packages come after its own. Because a .pth file names the folders, the .pth files in them
    # (an editable install) are not read.
    [site] = venv.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")

    elsewhere.mkdir()
    shutil.copy(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml", elsewhere)
    reward = site / "bapo_openrlhf" / "tasks" / "math.py"  # presets name the file by its path in the project's folder
    run([python, "-c", USE], elsewhere)
    version = run([program, "--version"], elsewhere).strip()
    assert f"-{version}-" in wheel.name, version
    assert "usage: bapo-openrlhf" in run([program, "--help"], elsewhere)
    words = ["--config", "ba_ppo_qwen3_4b.yaml", "--prompts", "40000", "--reward.remote_url", reward]
    assert "configuration is valid" in run([program, "check", *words], elsewhere)
    run([program, "prepare", "countdown", "--generate", "small", "--size", "train=8"], elsewhere)
    assert len((elsewhere / "data" / "countdown" / "train.jsonl").read_text().splitlines()) == 8
    run([program, "init", "mine"], elsewhere)
    assert "configuration is valid" in run([program, "check", "--config", "mine/config.yaml"], elsewhere)


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command and return its standard output. If it fails, raise a SystemExit with its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))[:200]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

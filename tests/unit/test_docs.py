"""README and docs say what is there."""

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_openrlhf import config
from bapo_openrlhf.cli import arguments

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


def test_configuration_reference_is_up_to_date():
    assert subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], check=False).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_presets_exist(page):
    text = page.read_text()
    known = {f"--{prefix}.{item.name}" for prefix, kind in config.GROUPS.items() for item in config.flag_fields(kind)}
    assert set(re.findall(r"--(?:adapt|run)\.[a-z0-9_]+", text)) <= known
    for name in re.findall(r"configs/[\w.]+\.yaml", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_parse(preset):
    args = arguments.parse(["--config", str(preset)])
    assert args.algorithm in config.ALGORITHMS


def test_code_named_in_the_paper_map_exists():
    text = (ROOT / "docs" / "paper_to_code.md").read_text()
    names = re.findall(r"`([a-z_/]+\.py):([A-Za-z0-9_.]+)`", text)
    assert len(names) > 20
    for file, path in names:
        assert (ROOT / "bapo_openrlhf" / file).is_file(), file
        if file.startswith("integration/"):  # imports the stack: look the names up in the text
            source = (ROOT / "bapo_openrlhf" / file).read_text()
            for part in path.split("."):
                assert re.search(rf"(class|def) {part}\b", source), path
            continue
        found = importlib.import_module("bapo_openrlhf." + file.removesuffix(".py").replace("/", "."))
        for part in path.split("."):
            found = getattr(found, part)
    for test in re.findall(r"`((?:unit|stack)/\w+\.py)`", text):
        assert (ROOT / "tests" / test).is_file(), test


def test_every_dependency_has_its_line():
    project = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0].split("\ndependencies = ")[1]
    wanted = set(re.findall(r'"([A-Za-z][\w-]*)(?:\[[\w,]+\])?[^"]*"', project))
    wanted |= set(re.findall(r"^([a-z][\w-]*)==", (ROOT / "requirements" / "cpu-no-deps.txt").read_text(), re.M))
    named = set(re.findall(r"\*\*([\w-]+)(?:\[\w+\])?\*\*", (ROOT / "docs" / "dependencies.md").read_text()))
    assert wanted == named


class TestExample:
    """examples/custom_method: the method in docs/add_a_method.md."""

    FILE = ROOT / "examples" / "custom_method" / "fifo_replay.py"

    def test_the_page_shows_the_file(self):
        shown = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "add_a_method.md").read_text(), re.S).group(1)
        assert shown == self.FILE.read_text()

    def test_it_fills_the_batch_with_the_most_recent(self, make_group):
        kind = runpy.run_path(str(self.FILE))["FIFOReplay"]
        method = kind(capacity=3, memory=3)
        first = [make_group(4, step=0), make_group(0, step=0), make_group(2, step=0)]
        batch = method.build_batch(0, first, [])
        assert (batch.fresh, batch.replayed) == ([first[0], first[2]], [])
        second = [make_group(8, step=1), make_group(1, step=1)]
        twin = kind(capacity=3, memory=3)
        twin.load_state_dict(method.state_dict())
        batch = method.build_batch(1, second, [])
        assert (batch.fresh, batch.replayed) == ([second[1]], [first[0], first[2]])
        assert method.metrics() == {"groups/fresh": 1, "groups/replayed": 2}
        assert [group.uid for group in twin.build_batch(1, second, []).replayed] == [first[0].uid, first[2].uid]

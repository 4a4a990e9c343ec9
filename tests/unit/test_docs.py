"""README and docs say what is there."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_openrlhf import host
from bapo_openrlhf.adapt.vocabulary import STATES
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import save_state
from bapo_openrlhf.tasks import TASKS

ROOT = Path(__file__).parents[2]
PAGES = [path for folder in (".", "docs", "examples/trl") for path in sorted((ROOT / folder).glob("*.md"))]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
picture = runpy.run_path(str(ROOT / "docs" / "architecture_picture.py"))


def test_references_are_up_to_date():
    assert subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], check=False).returncode == 0


def anchors(page):
    """Anchors of a Markdown page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


GENERATED = ("CHANGELOG", "api", "config", "metrics")


def test_the_pages_are_short_enough_to_be_read():
    """Words as `wc -w` counts them, without what docs/generate.py writes. A fact stands on one page."""
    words = {}
    for page in (page for page in PAGES if page.stem not in GENERATED):
        written = re.sub(r"<!-- generated: .*?<!-- end -->", "", page.read_text(), flags=re.S)
        words[str(page.relative_to(ROOT))] = len(written.split())
    assert sum(words.values()) <= 34_000, sorted(words.items(), key=lambda item: -item[1])


def test_the_readme_is_read_in_minutes():
    words = re.sub(r"```.*?```|^\|[^\n]*$", "", (ROOT / "README.md").read_text(), flags=re.M | re.S).split()
    assert sum(bool(re.search(r"\w", word)) for word in words) <= 700


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_presets_exist(page):
    text = page.read_text()
    parsers = arguments.build_parser("docs"), host.build_parser("train_sft")  # supervised training
    flags = set(re.findall(r"(?<![\w-])--[a-z_]+\.[a-z0-9_.]*[a-z0-9_]", text))
    assert flags <= {flag for parser in parsers for flag in parser._option_string_actions}
    for name in re.findall(r"configs/[\w./]+\.yaml", text):
        assert (ROOT / name).is_file(), name


WITH_COMMENTS = [
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *(path for path in sorted((ROOT / "examples").rglob("*")) if path.is_file() and "__pycache__" not in path.parts),
]


@pytest.mark.parametrize("file", WITH_COMMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_configurations_and_examples_name_what_is_there(file):
    test_flags_and_presets_exist(file)
    for name in re.findall(r"\b(?:docs|examples|research|tests)/[\w./]+\.(?:md|py|sh|yaml)", file.read_text()):
        assert (ROOT / name).is_file(), name


def test_security_names_each_command_that_runs_the_code_of_a_model():
    places = {"cli/prepare": "prepare --tokenizer", "workbench/evaluation": "evaluate", "workbench/smoke": "smoke",
              "data": "check", "launch": "check", "training": "train"}  # fmt: skip
    row = re.search(r"^\| models and tokenizers .*$", (ROOT / "SECURITY.md").read_text(), re.M)[0]
    for file in (ROOT / "bapo_openrlhf").rglob("*.py"):
        if "trust_remote_code" in file.read_text():
            name = file.relative_to(ROOT / "bapo_openrlhf").as_posix()
            [command] = [command for place, command in places.items() if name.startswith(place)]
            assert f"`{command}`" in row, name


@pytest.mark.parametrize(("page", "least"), [("paper_to_code", 20), ("architecture", 3)])
def test_code_that_a_page_names_exists(page, least):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    names = re.findall(r"`([a-z_/]+\.py):([A-Za-z0-9_.]+)`", text)
    assert len(names) > least
    for file, path in names:
        body = ast.parse((ROOT / "bapo_openrlhf" / file).read_text()).body
        constants = [ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)]
        assert path in {*picture["names_of"](body), *constants}, f"{file}:{path}"
    for test in re.findall(r"`((?:unit|stack)/[\w/]+\.py)`", text):
        assert (ROOT / "tests" / test).is_file(), test


def numbers(text):
    """The numbers in "1, 3-5 (7)": 1, 3, 4, 5, 7."""
    ends = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}


def test_paper_to_code_has_every_equation_and_every_line_of_algorithm_1():
    text = (ROOT / "docs" / "paper_to_code.md").read_text()
    equations = numbers(" ".join(re.findall(r"Eq\. ([\d, ()-]+(?:and [\d-]+)?)", text)))
    assert equations == set(range(1, 40))
    rows = text.split("## Algorithm 1")[1].split("##")[0]
    lines = numbers(" ".join(re.findall(r"^\| ([\d, -]+),", rows, re.M)))
    assert lines == set(range(1, 21)) - {2, 10}  # comments


def test_every_metric_that_is_named_in_the_code_is_in_the_catalogue():
    """A run's metrics are compared in test_record_of_runs.py and on the stack; this finds names that no run reached."""
    known = {name for algorithm in metrics.ALL for name in metrics.names(algorithm, optional=True)}
    kinds = "|".join(sorted({name.split("/")[0] for name in known if "/" in name}))
    result = set()
    for folder in ("adapt", "methods", "training"):
        for file in (ROOT / "bapo_openrlhf" / folder).rglob("*.py"):
            result |= set(re.findall(rf'"((?:{kinds})/[a-z0-9_]+|skipped_update)"', file.read_text()))
    assert len(result) > 30 and result <= known
    names = [metric.name for metric in metrics.all_metrics()]
    assert len(set(names)) == len(names)


def test_every_dependency_has_its_line():
    project = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0].split("\ndependencies = ")[1]
    wanted = set(re.findall(r'"([A-Za-z][\w-]*)(?:\[[\w,]+\])?[^"]*"', project)) - {"bapo_openrlhf"}  # its extra
    for file in (ROOT / "requirements").glob("*-no-deps.txt"):
        wanted |= set(re.findall(r"^([a-z][\w-]*)==", file.read_text(), re.M))
    named = set(re.findall(r"\*\*([\w-]+)(?:\[\w+\])?\*\*", (ROOT / "docs" / "dependencies.md").read_text()))
    assert wanted == named


SHOWN = {
    "add_a_method": "examples/custom_method/fifo_replay.py",
    "agents": "examples/agent/second_try.py",
    "own_data": "bapo_openrlhf/workbench/init/reward.py",
}


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_shows_a_file(page):
    shown = re.search(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.S)[1]
    assert shown == (ROOT / SHOWN[page]).read_text()


def test_the_page_of_an_own_method_shows_its_test_and_every_list_that_it_fills():
    """The test passes. The trainer fills the other lists, once it knows the log-probs."""
    file = ROOT / "examples" / "custom_method" / "test_fifo_replay.py"
    page = (ROOT / "docs" / "add_a_method.md").read_text()
    assert file.read_text().endswith(page.split("## Test it")[1].split("```")[1].removeprefix("python"))
    runpy.run_path(str(file))["test_it_replays_the_newest_groups"]()
    rule = page.split("## What a method has to do")[1].split("Every generated group")[1].split(".")[0]
    assert set(re.findall(r"`(\w+)`", rule)) == set(STATES) - {"too_far", "nonfinite"}


def test_every_correction_has_its_line():
    text = (ROOT / "docs" / "methods.md").read_text().split("## Corrections for stale rollouts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)\.yaml` ", text, re.M)
    assert sorted(rows) == sorted(path.stem for path in (ROOT / "configs" / "corrections").glob("*.yaml"))


PAPER = [preset for preset in PRESETS if preset.stem not in ("quickstart", "math_one_gpu")]
NOT_RUN = "# Not run yet: it needs 8 GPUs."


def table_of_presets():
    rows = re.findall(r"^\| `([\w.]+)`(.*)$", (ROOT / "docs" / "presets.md").read_text(), re.M)
    return {name: [cell.strip() for cell in rest.strip(" |").split("|")] for name, rest in rows}


def test_every_preset_has_its_script_and_its_line():
    assert {preset.stem for preset in PRESETS} == set(table_of_presets())
    assert {preset.stem for preset in PAPER} == {path.stem for path in (ROOT / "examples" / "ray_job").glob("*.sh")}


@pytest.mark.parametrize("preset", PAPER, ids=lambda preset: preset.stem)
def test_preset_script_and_page_say_the_same(preset, tmp_path):
    """The script is run with a Ray and a command line that only write down how they were called."""
    args = arguments.parse(["--config", str(preset)])
    script = preset.parents[1] / "examples" / "ray_job" / f"{preset.stem}.sh"
    model, task = table_of_presets()[preset.stem][:2]
    assert args.actor.model_name_or_path.rsplit("/", 1)[1] in model
    only_checked = table_of_presets()[preset.stem][-1].startswith("`check`")
    assert only_checked == (NOT_RUN in preset.read_text()) == (NOT_RUN in script.read_text())
    for name in ("ray", "bapo-openrlhf"):
        stub = tmp_path / name
        stub.write_text('#!/bin/sh\necho "$(basename "$0")|$*" >> "$CALLS"\n')
        stub.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": f"{tmp_path}/calls"}
    subprocess.run([script, "--algorithm", "grpo"], check=True, env=environment, cwd=tmp_path)
    prepare, check, status, submit = (tmp_path / "calls").read_text().splitlines()
    name = args.data.prompt_dataset.split("/")[1]
    assert prepare == f"bapo-openrlhf|prepare {name}" and name in TASKS
    config = f"configs/{preset.name}"
    assert check == f"bapo-openrlhf|check --config {config} --algorithm grpo" and status == "ray|status"
    assert submit.startswith("ray|job submit --address http://")
    assert submit.endswith(f" -- env -C {ROOT} bapo-openrlhf train --config {config} --algorithm grpo")
    assert args.reward.remote_url == [f"bapo_openrlhf/tasks/{name}.py"]
    assert args.data.prompt_dataset == f"data/{name}/train.jsonl"
    assert (args.data.max_images_per_prompt > 0) == (name == "geometry")
    assert args.run.name == preset.stem and args.ckpt.path == f"runs/{preset.stem}/checkpoints"
    assert {"math": "mathematics", "countdown": "Countdown", "geometry": "Geometry3K"}[name] in task


def test_reward_and_problems_of_the_custom_task():
    folder = ROOT / "examples" / "custom_task"
    answers = {"3+4<eos>": 1, "7": 0, "7<eos>": 0, "3+3<eos>": 0, "3+4+": 0, "": 0, "10-3": 0, "1+1+5": 1, "x": 0}
    given = [[f"3 4:7={answer}" for answer in answers], ["3 4:7="] * 9, ["7"] * 9, [*answers]]
    assert runpy.run_path(str(folder / "reward.py"))["reward_func"](*given)["rewards"] == list(answers.values())
    rows = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    assert len({row["input"] for row in rows}) == len(rows) == 128
    for row in rows:
        numbers, target = re.fullmatch(r"([\d ]+):(\d+)=", row["input"]).groups()
        assert sum(map(int, numbers.split())) == int(target) == int(row["label"])


def test_the_lines_that_read_the_buffers_of_a_checkpoint(tmp_path, monkeypatch, capsys, make_group):
    """docs/watch.md, with a hard prompt and a group to replay."""
    method = BAPO(capacity=2, group_size=8)
    method.build_batch(0, [make_group(0, prompt="1+1="), make_group(2, prompt="1+2=", uid=7)], [])
    checkpoints, tag = CheckpointStore(tmp_path / "runs" / "quickstart" / "checkpoints", critic=False), "global_step1"
    save_state(checkpoints.begin(tag), {"version": 1, "step": 1, "weights_version": 1, "method": method.state_dict()})
    (checkpoints.path / "_actor" / tag).mkdir(parents=True)
    (checkpoints.path / "_actor" / tag / "model.pt").touch()
    checkpoints.complete(tag, 1)
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs" / "watch.md").read_text(), re.S)[1], {})
    assert capsys.readouterr().out.splitlines() == [
        "group 7 of step 0, mean reward 0.250: 1+2=",
        "hard prompt since step 0, mean reward 0: 1+1=",
    ]

"""What docs/architecture.md shows: the order of the subpackages, the figures, the sizes of files and functions."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bapo_openrlhf"
picture = runpy.run_path(str(ROOT / "docs" / "architecture_picture.py"))
FILES = sorted(PACKAGE.rglob("*.py"))
MOST = {"file": 450, "class": 250, "function": 65}  # lines


def name_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(file) for file in FILES}


def imports_of(source):
    """Modules of this package that a source imports, also inside its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bapo_openrlhf":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "bapo_openrlhf")


def row(module):
    """How far down a module's subpackage is in the figure; the package itself, with its version, is at the bottom."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(picture["SUBPACKAGES"])
    package = parts[1] if parts[1] in picture["SUBPACKAGES"] else f"{parts[1]}.py"
    return picture["SUBPACKAGES"].index(package)


def test_the_figure_has_every_subpackage():
    inside = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert inside - {"__init__.py"} == set(picture["SUBPACKAGES"])


def by_file(found_in):
    """What a function finds in the files of the package, by the files in which it finds something."""
    result = {str(file.relative_to(PACKAGE)): list(found_in(name_of(file), file.read_text())) for file in FILES}
    return {file: found for file, found in result.items() if found}


def test_imports_go_down_only():
    assert by_file(lambda name, source: (m for m in imports_of(source) if row(m) < row(name))) == {}


def room_of(module):
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["training"] and len(parts) > 2 else None


def other_rooms(name, source):
    """Imports of a file of `training/` from rooms that its own must not know."""
    room = room_of(name)
    allowed = {None, room, *picture["ROOMS"].get(room, ())}
    return [module for module in imports_of(source) if room and room_of(module) not in allowed]


def test_a_room_knows_only_those_that_the_table_names():
    assert by_file(other_rooms) == {}
    rooms = {path.name for path in (PACKAGE / "training").iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(picture["ROOMS"])


ALL_OF = """
import importlib, pkgutil, sys
before = set(sys.modules)
for part in ("adapt", "methods"):
    package = importlib.import_module("bapo_openrlhf." + part)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
"""


def test_the_pure_layer_needs_numpy_and_yaml_only():
    done = subprocess.run([sys.executable, "-c", ALL_OF], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {name for name in done.stdout.split() if not name.startswith(("_", "cython"))}
    assert loaded == {"bapo_openrlhf", "numpy", "yaml"}


def test_the_types_of_the_pure_layer_are_checked_strictly():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] is True
    assert {f"bapo_openrlhf/{name}" for name in ("adapt", "methods", "errors.py")} <= set(settings["files"])
    assert all((ROOT / name).exists() for name in settings["files"])


STACK = {"torch", "ray", "vllm", "openrlhf", "deepspeed"}
CHARTS = {"pandas", "altair", "vl_convert", "matplotlib"}
COMMAND = "from bapo_openrlhf.cli import main; assert main.run({!r}) == 0"
PLAN = ["plan", "--config", "configs/ba_ppo_qwen3_4b.yaml", "--ds.zero_stage=3"]
CHECK = ["check", "--algorithm=grpo", "--actor.model_name_or_path=org/model", "--run.name=light",
         "--reward.remote_url=bapo_openrlhf/workbench/init/reward.py", "--rollout.n_samples_per_prompt=8",
         "--rollout.batch_size=16", "--vllm.num_engines=1", "--data.label_key=label",
         "--ds.attn_implementation=sdpa"]  # fmt: skip
# A program, and what it must not load: it would be slow to start, or would need a GPU.
LIGHT = [
    ("from bapo_openrlhf.workbench.study import page; from bapo_openrlhf.workbench.report import sections", STACK),
    ("from bapo_openrlhf.cli import main, check, watch; from bapo_openrlhf.workbench.pages import colours", CHARTS),
    ("from bapo_openrlhf.record import follow; from bapo_openrlhf.cli import watch",
     STACK | CHARTS | {"numpy", "transformers"}),
    ("from bapo_openrlhf.record import run_record", STACK | CHARTS | {"numpy", "rich"}),
    ("from bapo_openrlhf.record import metrics", STACK | CHARTS | {"rich"}),
    ("from bapo_openrlhf.launch import resume, start; from bapo_openrlhf.training.driver import signals", STACK),
    # what travels, which every process of a run reads
    ("from bapo_openrlhf.training.wire import failures, packing, responses, signals",
     STACK - {"torch"} | {"transformers"}),
    (COMMAND.format(PLAN), STACK | {"transformers", "datasets"}),
    (COMMAND.format([*CHECK, "--data.prompt_dataset=org/data", "--prompts=83"]), STACK | {"transformers", "datasets"}),
    (COMMAND.format([*CHECK, "--data.prompt_dataset=examples/custom_task/problems.jsonl"]), STACK | {"transformers"}),
    (COMMAND.format(["methods"]), STACK | {"transformers", "pandas"}),
]  # fmt: skip


@pytest.mark.parametrize(("program", "heavy"), LIGHT, ids=[program for program, _ in LIGHT])
def test_it_loads_nothing_heavy(program, heavy):
    program += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert heavy & set(done.stdout.split()) == set()


def test_the_product_knows_nothing_of_research():
    kinds = (".py", ".yaml", ".md", ".sh", ".jinja")
    folders = [ROOT / name for name in ("bapo_openrlhf", "configs", "examples")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    assert [path for path in files if re.search(r"(?<![\w.-])research[/.](?!benchmarks)\w+", path.read_text())] == []


def test_no_two_files_import_each_other():
    """Nor more than two in a circle: files are taken away whose imports are all away, until none is left."""
    left = {name_of(file): set(imports_of(file.read_text())) - {name_of(file)} for file in FILES}
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


def too_large(_, source):
    """Classes and functions above the limits, with their numbers of lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if lines > MOST["class" if isinstance(node, ast.ClassDef) else "function"]:
                yield node.name, lines
    if (lines := source.count("\n")) > MOST["file"]:
        yield "the file", lines


def test_nothing_is_too_large_to_read():
    assert by_file(too_large) == {}


@pytest.mark.parametrize("name", ["subpackages", "rooms", "step"])
def test_figures_are_those_of_the_code(name):
    """If this fails: `python docs/architecture_picture.py` draws them again."""
    drawn = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == picture[f"{name}_picture"]()


def test_the_stages_of_a_step_are_called_in_this_order():
    """Those that `train_step` calls itself stand in the figure in the order of its lines."""
    trainer = (PACKAGE / "training" / "trainer" / "trainer.py").read_text()
    step = next(n for n in ast.walk(ast.parse(trainer)) if isinstance(n, ast.FunctionDef) and n.name == "train_step")
    calls = {}
    for node in ast.walk(step):
        if isinstance(node, ast.Call):
            calls.setdefault(ast.unparse(node.func).split(".")[-1], node.lineno)
    names = [stage.function.split(".")[-1] for stage in picture["STAGES"]]
    lines = [calls[name] for name in names if name in calls]
    assert len(lines) >= 3 and lines == sorted(lines)

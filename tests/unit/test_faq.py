"""docs/faq.md quotes messages that the code can produce, word for word."""

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest

from bapo_openrlhf.cli import main

pytestmark = pytest.mark.usefixtures("without_models")

ROOT = Path(__file__).parents[2]
QUOTED = re.findall(r"^```text\n(.*?)\n```$", (ROOT / "docs" / "faq.md").read_text(), re.M | re.S)
# Where messages of other programs stand in their source.
OTHERS = {
    "vllm": ["config/device.py", "v1/worker/cpu_worker.py", "v1/core/kv_cache_utils.py"],
    "ray": ["exceptions.py", "_private/services.py", "autoscaler/_private/util.py"],
    "transformers": ["tokenization_utils_base.py"],
}
VARIABLE = "\0"


def template(node):
    """A string expression with VARIABLE in the place of each value; None for what is no string."""
    if isinstance(node, ast.Constant):
        return re.sub(r"{(it|f[.\[][^{}]*)}", VARIABLE, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or VARIABLE for part in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = template(node.func.value)
        return text and re.sub(r"{\w*}", VARIABLE, text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [template(side) for side in (node.left, node.right)]
        return None if sides == [None, None] else "".join(side or VARIABLE for side in sides)
    return None


@cache
def templates(file):
    result = {template(node) for node in ast.walk(ast.parse(file.read_text()))}
    return {text.strip() for text in result if text and len(text.replace(VARIABLE, "").strip()) >= 18}


def matches(message, text):
    parts = text.split(VARIABLE)
    return all(part in message for part in parts) and bool(
        re.fullmatch(".*".join(map(re.escape, parts)), message, re.S)
    )


def has_message(message, files, whole=True):
    """Whether a file has the message; if it need not be whole, its first sentences must be there."""
    for text in set().union(*map(templates, files)):
        ends = [] if whole else [match.start() + 1 for match in re.finditer(r"[.!:](?= )", text)]
        if any(matches(message, text[:end]) for end in ends) or matches(message, text + VARIABLE * (not whole)):
            return True
    return False


def sources(package):
    """Files of another program, or None if it is not installed. Nothing of it is imported."""
    spec = importlib.util.find_spec(package)
    return spec and [Path(spec.submodule_search_locations[0]) / name for name in OTHERS[package]]


def test_every_quoted_message_is_in_the_code():
    assert len(QUOTED) > 15
    files = (ROOT / "bapo_openrlhf/training").rglob("*.py")
    phases = {phase for file in files for phase in re.findall(r'\.phase[\w, ]* = "([^"]+)"', file.read_text())}
    modules = tuple(sorted((ROOT / "bapo_openrlhf").rglob("*.py")))
    other = [sources(package) for package in OTHERS]
    unknown = []
    for message in QUOTED:
        text = message.removeprefix("error: ").removeprefix("warning: ").removeprefix("ckpt.load_enable: ")
        if step := re.match(r"step \d+, ([^:]+): \w+: ", text):  # as RunState puts it before what went wrong
            assert step[1] in phases, message
            text = text[step.end() :]
        of_a_row = re.sub(r"^\S+ \S+, row \d+: ", "", text)  # as RowCheck puts the row before what is wrong with it
        if not (has_message(text, modules) or has_message(of_a_row, modules)) and not any(
            files is None or has_message(text, files, whole=False) for files in other
        ):
            unknown.append(message)
    assert not unknown


# ── Printed for real ──


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("configs", "bapo_openrlhf"):
        (tmp_path / name).symlink_to(ROOT / name)
    files = {
        "runs/base_model/config.json": '{"model_type": "qwen2"}',
        "runs/base_model/pytorch_model.bin": "",
        "runs/data/train.jsonl": json.dumps({"input": "1 2:3=", "label": "1 2:3"}),
        "data/train.jsonl": '{"input": "1 2:3=", "label": 7}\n{"input": "1 2:4=", "label": "0"}',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_printed_as_quoted(folder, capsys):
    words = ["check", "--config", "configs/countdown/train.yaml", "--data.prompt_dataset", "data/train.jsonl"]
    assert main.run(words) == 2
    printed = capsys.readouterr().err.strip().splitlines()[-1].replace(str(folder), "/home/me/work")
    assert printed in QUOTED

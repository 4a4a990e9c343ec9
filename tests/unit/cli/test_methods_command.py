"""`bapo-openrlhf methods`. docs/methods.md has the same table, which docs/generate.py writes."""

import importlib
import re
from pathlib import Path

import pytest

from bapo_openrlhf.cli import main
from bapo_openrlhf.methods.registry import METHODS, method_class, overview

ROOT = Path(__file__).parents[3]
FILES = {path.stem for path in (ROOT / "configs" / "methods").glob("*.yaml")}


def test_names_are_all_methods_and_all_files():
    assert set(overview()) == {*METHODS, *FILES}
    assert list(overview())[: len(METHODS)] == METHODS  # what --adapt.method takes comes first


@pytest.mark.parametrize("name", [*METHODS, *sorted(FILES - set(METHODS))])
def test_each_says_what_it_does_when_to_use_it_and_its_source(name):
    sentence, use, source = overview()[name]
    assert sentence and re.match(r"Use it |Start with it", use)
    assert re.search(r"arXiv \d{4}\.\d{5}|[\w-]+/[\w-]+ at [0-9a-f]{7}", source)


@pytest.mark.parametrize("name", METHODS)
def test_the_source_is_the_one_of_the_file(name):
    kind = method_class(name)
    module = importlib.import_module(kind.__module__)
    [of_class] = re.findall(r"\d{4}\.\d{5}|(?<= at )[0-9a-f]{7}", kind.SOURCE)
    assert of_class in f"{module.__doc__} {kind.__doc__}"


def test_the_command_prints_all_of_it(capsys):
    assert main.run(["methods"]) == 0
    words = set(capsys.readouterr().out.replace("│", " ").split())
    for name, cells in overview().items():
        assert {name, *" ".join(cells).split()} <= words, name

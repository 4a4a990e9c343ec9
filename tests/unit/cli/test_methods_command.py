"""`bapo-openrlhf methods` and the table at the start of docs/methods.md."""

import importlib
import re
from pathlib import Path

import pytest

from bapo_openrlhf.cli import main
from bapo_openrlhf.methods.registry import METHODS, method_class, overview

ROOT = Path(__file__).parents[3]
FILES = {path.stem for path in (ROOT / "configs" / "methods").glob("*.yaml")}
HEAD = ("name", "what it does", "when to use it", "source")


def printed(text: str) -> list[tuple[str, ...]]:
    """The rows of a table in the terminal, whose cells may have several lines; a row begins where there is a name."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("│", "┃")):
            cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
            rows = [*rows, [""] * len(cells)] if cells[0] else rows
            rows[-1] = [f"{before} {cell}".strip() for before, cell in zip(rows[-1], cells, strict=True)]
    return [tuple(row) for row in rows]


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
    out = capsys.readouterr().out
    assert printed(out) == [HEAD, *((name, *cells) for name, cells in overview().items())]
    line = out.index("├")  # between what --adapt.method takes and what is only a file
    names = [row[0] for row in printed(out[:line])[1:]]
    assert names == METHODS and "Above the line: values of --adapt.method" in out


def test_the_page_begins_with_the_same_table():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    table = text.split("\n| ", 1)[1].split("\n\n", 1)[0]
    rows = [tuple(cell.strip(" `|") for cell in row.split(" | ")) for row in table.splitlines()]
    assert rows == [HEAD, ("---",) * 4, *((name, *cells) for name, cells in overview().items())]

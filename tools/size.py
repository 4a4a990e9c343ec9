"""Counts the project by room: files, lines, and lines of code, which have neither a docstring, a comment nor nothing.

python tools/size.py           # prints the table of docs/architecture.md
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TRAINS = ("adapt", "methods", "flags", "data", "launch", "training", "record")
"""The rooms of the package without which no run trains."""


class Size(NamedTuple):
    """Numbers of files, of lines, and of lines of code."""

    files: int
    lines: int
    code: int


def docstrings(source: str) -> set[int]:
    """The lines, counted from 1, of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            text = body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def code_lines(source: str) -> int:
    """The number of lines that have code."""
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings(source))


def size(files: Iterable[Path]) -> Size:
    """The size of Python files together."""
    sources = [path.read_text(encoding="utf-8") for path in files]
    return Size(len(sources), sum(text.count("\n") for text in sources), sum(map(code_lines, sources)))


def rows() -> list[tuple[str, Size]]:
    """The size of each room of the package, of what trains, of the package, and of the other folders."""
    package = ROOT / "bapo_openrlhf"
    rooms = sorted(path.name for path in package.iterdir() if (path / "__init__.py").exists())
    table = [(f"`{room}/`", size((package / room).rglob("*.py"))) for room in rooms]
    train = [path for room in TRAINS for path in (package / room).rglob("*.py")]
    table.append(("what trains: " + ", ".join(TRAINS), size(train)))
    table.append(("the package", size(package.rglob("*.py"))))
    return table + [(f"`{name}/`", size((ROOT / name).rglob("*.py"))) for name in ("tests", "research", "tools")]


def main() -> None:
    """Print the table."""
    print("| room | files | lines | of code |\n| --- | ---: | ---: | ---: |")
    for name, one in rows():
        print(f"| {name} | {one.files} | {one.lines:,} | {one.code:,} |")


if __name__ == "__main__":
    main()

"""The rows of a JSON or CSV file. Each value is what the file has: nothing is made of a text that looks like a date.

A CSV file has only texts.
"""

import csv
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.user_file import ENCODINGS

Row = Mapping[str, Any]
TEXTS = (".json", ".jsonl", ".csv")  # endings of these files
READ_AS = "save the file as UTF-8, for example with `iconv -f {} -t utf-8`"


def kind_of(path: Path) -> str:
    """The ending of a file, without that of gzip: .jsonl for rows.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def rows_of(where: str, path: Path) -> Iterator[Row]:
    """The rows of a file that ends in .json, .jsonl or .csv, or such a file packed with gzip.

    Only a .json file is held in memory as a whole. A line that is not what its ending says is a ConfigError.
    """
    if kind_of(path) == ".csv":
        return _csv_rows(where, _lines(where, path))
    if kind_of(path) == ".json":
        text = "".join(_lines(where, path))
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # it is not lines of JSON either
                raise ConfigError(f"{where}, line {error.lineno}: no valid JSON ({error.msg})") from None
        except ValueError as error:  # a number with more digits than Python reads
            raise ConfigError(f"{where}: no valid JSON ({error})") from None
        else:
            return _objects(where, enumerate(content if isinstance(content, list) else [content], 1), "element")
    return _objects(where, _values(where, _lines(where, path)), "line")


def _lines(where: str, path: Path) -> Iterator[str]:
    start = b""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                start = start or line
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, EOFError) as error:  # no permission, or it is not packed
        raise ConfigError(f"{where} cannot be read: {one_line(error)}") from None
    except UnicodeDecodeError as error:
        encoding = next((name for mark, name in ENCODINGS.items() if start.startswith(mark)), "latin1")
        raise ConfigError(
            f"{where}, line {number}: no valid UTF-8 ({error.reason}); {READ_AS.format(encoding)}"
        ) from None


def _values(where: str, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{where}, line {number}: no valid JSON ({getattr(error, 'msg', str(error))})"
                ) from None


def _objects(where: str, values: Iterable[tuple[int, Any]], unit: str) -> Iterator[Row]:
    for number, value in values:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}, {unit} {number}: must be a JSON object, is {type(value).__name__}")
        yield value


def _csv_rows(where: str, text: Iterable[str]) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(text)
    try:
        header = next(lines, [])
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise ConfigError(f"{where}, line 1: the column {twice!r} is there twice; each must have a name of its own")
        for cells in lines:
            if len(cells) < 2 and not "".join(cells).strip():
                continue  # an empty line
            if len(cells) != len(header):
                raise ConfigError(f"{where}, line {lines.line_num}: {len(cells)} cells for {len(header)} columns")
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{where}, line {lines.line_num}: no valid CSV ({error})") from None

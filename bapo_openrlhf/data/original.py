"""The rows of a text file as the file has them, and whether a reader changed a value.

JSON and CSV have no types for columns, so OpenRLHF's reader (`datasets`) guesses them. It makes a date of the text
"2024-01-01", the number 0 of the text "0" if another row has a number, 1.0 of 1 if another row has 2.5, and the number
7 of 007 in a CSV file. A reward function would then get another label than the file has.
"""

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bapo_openrlhf.data.findings import shown
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.user_file import ENCODINGS

Row = Mapping[str, Any]
SURROGATE = re.compile("[\ud800-\udfff]")  # json.loads makes one character of a whole pair
READ_AS = "save the file as UTF-8, for example with `iconv -f {} -t utf-8`"


def kind_of(path: Path) -> str:
    """The ending of a file, without that of gzip: .jsonl for rows.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def rows_of(where: str, path: Path) -> Iterator[Row]:
    """The rows of a file that ends in .json, .jsonl or .csv, or such a file packed with gzip.

    Args:
        where: Flag and file. Errors name them.
        path: The file.

    Raises:
        ConfigError: A line is not what its ending says. The message names the line.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:  # no permission, or it is not packed
        raise ConfigError(f"{where} cannot be read: {one_line(error)}") from None
    text = _decoded(where, content)
    if kind_of(path) == ".csv":
        return _csv_rows(where, text)
    if kind_of(path) == ".json":
        try:
            whole = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # it is not lines of JSON either
                raise ConfigError(f"{where}, line {error.lineno}: no valid JSON ({error.msg})") from None
        except ValueError as error:  # a number with more digits than Python reads
            raise ConfigError(f"{where}: no valid JSON ({error})") from None
        else:
            return _objects(where, enumerate(whole if isinstance(whole, list) else [whole], 1), "element")
    return _objects(where, _lines(where, text), "line")


def _decoded(where: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        encoding = next((name for mark, name in ENCODINGS.items() if content.startswith(mark)), "latin1")
        raise ConfigError(
            f"{where}, line {line}: no valid UTF-8 ({error.reason}); {READ_AS.format(encoding)}"
        ) from None


def _lines(where: str, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{where}, line {number}: no valid JSON ({getattr(error, 'msg', str(error))})"
                ) from None


def _objects(where: str, values: Iterator[tuple[int, Any]], unit: str) -> Iterator[Row]:
    for number, value in values:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}, {unit} {number}: must be a JSON object, is {type(value).__name__}")
        yield value


def _csv_rows(where: str, text: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(io.StringIO(text, newline=""))
    header = next(lines, [])
    for cells in lines:
        if len(cells) < 2 and not "".join(cells).strip():
            continue  # an empty line
        if len(cells) != len(header):
            raise ConfigError(f"{where}, line {lines.line_num}: {len(cells)} cells for {len(header)} columns")
        yield dict(zip(header, cells, strict=True))


def unreadable(value: Any) -> str | None:
    """What no reader of JSON files with types for columns can read in a value, and what is allowed."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return next(filter(None, map(unreadable, value)), None)
    if isinstance(value, str) and SURROGATE.search(value):
        return f"{shown(value)} has half of a surrogate pair; a text must be valid Unicode"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"{shown(value)} has more than 64 bits; write such a number as a text, in all rows"
    return None


def is_same(original: Any, read: Any) -> bool:
    """Whether a value that was read has the content and the type that JSON gives it."""
    if type(original) is not type(read):
        return False
    if isinstance(original, dict):
        return original.keys() == read.keys() and all(is_same(value, read[key]) for key, value in original.items())
    if isinstance(original, list):
        return len(original) == len(read) and all(map(is_same, original, read))
    return bool(original == read) or original != original  # NaN is no change


def is_same_cell(cell: str, read: Any) -> bool:
    """Whether a value that was read from a CSV file is written as in the file. An empty cell is read as null."""
    return cell == ("" if read is None else str(read))

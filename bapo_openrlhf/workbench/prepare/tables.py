"""Published tables: from the model hub, or from a local copy in one of the usual formats."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks.task import BadRow, Source

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class Table:
    """Rows to read, and where they come from.

    Attributes:
        origin: what the manifest says of it; equal for equal data as far as that is known without reading it.
        rows: numbered from 1. A row that cannot be read is the BadRow that says why.
        size: how many, where that is known.
    """

    origin: dict[str, Any]
    rows: Iterator[tuple[int, dict[str, Any] | BadRow]]
    size: int | None


def open_table(part: str, source: Source, local: Path | None) -> Table:
    """A source's rows, from its local copy where one is given.

    Args:
        part: name of the part it is read for; errors begin with it.
        local: file or folder; None means the hub.

    Raises:
        ConfigError: it cannot be reached or read, or it has not the columns of the source.
    """
    table = _local(part, source, local) if local is not None else _hub(part, source)
    return Table(table.origin, _with_columns(part, source, table), table.size)


def _with_columns(part: str, source: Source, table: Table) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows. The first one that can be read must have the columns; a later one that lacks one is bad."""
    checked = False
    for number, row in table.rows:
        if isinstance(row, BadRow):
            yield number, row
            continue
        missing = [column for column in source.columns if column not in row]
        if missing and not checked:
            raise ConfigError(
                f"{part}: {table.origin['from']} has the columns {', '.join(map(str, row))}; "
                f"it must have {', '.join(source.columns)}, as {source.hub} has"
            )
        checked = True
        yield number, BadRow(f"no column {missing[0]}") if missing else row


# ── local copies ──


def _local(part: str, source: Source, path: Path) -> Table:
    if path.is_dir():
        return _folder(part, source, path)
    if path.suffix not in FORMATS:
        raise ConfigError(f"{part}: local copy is {path}; it must be a folder or a file of {', '.join(FORMATS)}")
    if not path.is_file():
        raise ConfigError(f"{part}: local copy is {path}; there is no such file")
    with path.open("rb") as file:
        origin = {"from": str(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    read = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[path.suffix]
    try:
        rows, size = read(path)
    except (OSError, ValueError) as error:  # broken JSON, UTF-8, or (ArrowInvalid) parquet
        raise ConfigError(f"{part}: {path} cannot be read: {' '.join(str(error).split())}") from None
    return Table(origin, enumerate(rows, 1), size)


def _jsonl(path: Path) -> tuple[Iterator[dict[str, Any] | BadRow], int | None]:
    def rows() -> Iterator[dict[str, Any] | BadRow]:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except ValueError:  # no JSON, or no UTF-8
                    row = BadRow("no valid JSON")
                yield row if isinstance(row, (dict, BadRow)) else BadRow("no JSON object")

    return rows(), None


def _json(path: Path) -> tuple[Iterator[dict[str, Any] | BadRow], int | None]:
    rows = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise ValueError(f"a list of objects is needed, this is {type(rows).__name__}")
    return (row if isinstance(row, dict) else BadRow("no JSON object") for row in rows), len(rows)


def _csv(path: Path) -> tuple[Iterator[dict[str, Any] | BadRow], int | None]:
    def rows() -> Iterator[dict[str, Any] | BadRow]:
        csv.field_size_limit(2**27)  # the default, 128 KiB, is less than a long solution
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            try:
                for row in lines:
                    # DictReader's key None holds cells beyond the head's.
                    yield BadRow("more cells than columns") if None in row else row
            except (csv.Error, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}, after line {lines.line_num}: {error}") from None

    return rows(), None


def _parquet(path: Path) -> tuple[Iterator[dict[str, Any]], int | None]:
    parquet = _import("pyarrow.parquet")
    file = parquet.ParquetFile(path)
    batches = file.iter_batches(batch_size=ROWS_AT_A_TIME)
    return (row for batch in batches for row in batch.to_pylist()), file.metadata.num_rows


def _folder(part: str, source: Source, path: Path) -> Table:
    """A data set that `save_to_disk` wrote, or a copy of the hub's folder."""
    datasets = _import("datasets")
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            data = datasets.load_from_disk(str(path))
            if isinstance(data, datasets.DatasetDict):
                data = data[source.split]
        else:
            data = datasets.load_dataset(str(path), source.config, split=source.split)
    except Exception as error:
        raise ConfigError(f"{part}: {path} cannot be read as a data set: {_one_line(error)}") from None
    return Table({"from": str(path), "fingerprint": data._fingerprint}, enumerate(_rows_of(data), 1), len(data))


# ── the hub ──


def _hub(part: str, source: Source) -> Table:
    datasets = _import("datasets")
    try:
        data = datasets.load_dataset(source.hub, source.config, split=source.split)
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ConfigError(
            f"{part}: {source.hub} cannot be read from the model hub{offline}: {_one_line(error)}. Without the hub, "
            f"give a copy: --local {part}=PATH, a file ({', '.join(FORMATS)}) or a folder, with the columns "
            f"{', '.join(source.columns)}"
        ) from None
    origin = {"from": source.hub, "config": source.config, "split": source.split, "commit": _commit(data)}
    return Table(origin, enumerate(_rows_of(data), 1), len(data))


def _commit(data: Any) -> str | None:
    """The hub's commit, which is in the addresses of the files that were fetched."""
    addresses = " ".join(map(str, data.info.download_checksums or ()))
    found = re.search(r"@([0-9a-f]{40})/", addresses)
    return found.group(1) if found else None


def _rows_of(data: Any) -> Iterator[dict[str, Any]]:
    """Rows as they are stored: images stay files' contents, {"bytes": ..., "path": ...}."""
    for batch in data.with_format("arrow").iter(ROWS_AT_A_TIME):
        yield from batch.to_pylist()


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed ({error}); install the project's extra cpu or cuda") from None


def _one_line(error: BaseException, most: int = 300) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


def parse_local(words: Sequence[str], parts: Sequence[str]) -> dict[str, Path]:
    """--local PART=PATH, several times.

    Raises:
        ConfigError: no `=`, or no such part.
    """
    copies = {}
    for word in words:
        part, _, path = word.partition("=")
        if part not in parts or not path:
            raise ConfigError(f"--local is {word!r}; it must be PART=PATH, where PART is one of {', '.join(parts)}")
        copies[part] = Path(path).expanduser()
    return copies

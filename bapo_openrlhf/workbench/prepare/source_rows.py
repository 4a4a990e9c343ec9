"""The rows of published data sets, from the model hub or from a local copy in a usual format."""

import hashlib
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.tasks.task import BadRow, Source
from bapo_openrlhf.user_file import at_home, start_of

PATIENCE = 5  # seconds in which the hub must answer
ROWS_AT_A_TIME = 256


class HubError(ConfigError):
    """A part cannot be read from the model hub, and no other part either if the hub is `offline`."""

    def __init__(self, message: str, *, offline: bool) -> None:
        super().__init__(message)
        self.offline = offline


@dataclass(frozen=True)
class SourceRows:
    """Rows that are still to be read, and their origin."""

    origin: dict[str, Any]  # in the manifest; equal data have equal origins, as far as is known without reading
    rows: Iterator[tuple[int, Any]]  # numbered from 1: a dict or a BadRow; before the check anything that JSON has
    size: int | None  # None if the number of rows is not known


def open_source(part: str, source: Source, local: Path | None) -> SourceRows:
    """Open a source, or its local copy; a ConfigError names the part if it cannot be read or lacks a column."""
    opened = _local(part, source, local) if local is not None else _hub(part, source)
    return SourceRows(opened.origin, _with_columns(part, source, opened), opened.size)


def _with_columns(part: str, source: Source, opened: SourceRows) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows after a check. The first readable row must have all columns. A later row without one is bad."""
    checked = False
    for number, row in opened.rows:
        if not isinstance(row, dict):
            yield number, row if isinstance(row, BadRow) else BadRow("no JSON object")
            continue
        missing = [column for column in source.columns if column not in row]
        if missing and not checked:
            raise ConfigError(
                f"{part}: {opened.origin['from']} has the columns {', '.join(map(str, row))}; "
                f"it must have {', '.join(source.columns)}, as in {source.hub}"
            )
        checked = True
        yield number, BadRow(f"no column {missing[0]}") if missing else row


# ── local copies ──


def digest(path: Path) -> str | None:
    """The sha256 of a file. None means that there is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _local(part: str, source: Source, path: Path) -> SourceRows:
    if path.is_dir():
        return _folder(part, source, path)
    if path.suffix not in FORMATS:
        raise ConfigError(f"{part}: local copy is {path}; it must be a folder or a file of {', '.join(FORMATS)}")
    if not path.is_file():
        raise ConfigError(f"{part}: local copy is {path}; it must be a file that exists")
    origin = {"from": str(path), "sha256": digest(path)}
    try:
        rows, size = READERS[path.suffix](path)
    except (OSError, ValueError) as error:  # The JSON, UTF-8 or parquet (ArrowInvalid) is broken.
        raise ConfigError(f"{part}: {path} cannot be read: {one_line(error)}") from None
    return SourceRows(origin, enumerate(rows, 1), size)


def _jsonl(path: Path) -> tuple[Iterator[Any], int | None]:
    def rows() -> Iterator[Any]:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:  # It is not JSON or not UTF-8.
                    yield BadRow("no valid JSON")

    return rows(), None


def _json(path: Path) -> tuple[Iterator[Any], int | None]:
    rows = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise ValueError(f"it is a {type(rows).__name__} and must be a list of objects")
    return iter(rows), len(rows)


def _parquet(path: Path) -> tuple[Iterator[dict[str, Any]], int | None]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    batches = file.iter_batches(batch_size=ROWS_AT_A_TIME)
    return (row for batch in batches for row in batch.to_pylist()), file.metadata.num_rows


READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}  # of a file's rows, and of their number
FORMATS = tuple(READERS)


def _folder(part: str, source: Source, path: Path) -> SourceRows:
    import datasets

    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            data = datasets.load_from_disk(str(path))
            if isinstance(data, datasets.DatasetDict):
                data = data[source.split]
        else:
            data = datasets.load_dataset(str(path), source.config, split=source.split)
    except Exception as error:
        raise ConfigError(f"{part}: {path} cannot be read as a data set: {one_line(error)}") from None
    return SourceRows({"from": str(path), "fingerprint": data._fingerprint}, enumerate(_rows_of(data), 1), len(data))


# ── the hub ──


def _hub(part: str, source: Source) -> SourceRows:
    import datasets
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else ""
    silent = not reason and not _answers(constants.ENDPOINT)
    try:
        # If the hub does not answer, only its cache is asked, because the libraries would try again for minutes.
        with _offline(constants, datasets.config) if silent else nullcontext():
            data = datasets.load_dataset(source.hub, source.config, split=source.split)
    except Exception as error:
        reason = "it does not answer" if silent else reason
        raise HubError(
            f"{part}: {source.hub} cannot be read from the model hub{reason and f' ({reason})'}: {one_line(error)}",
            offline=bool(reason),
        ) from None
    origin = {"from": source.hub, "config": source.config, "split": source.split, "commit": _commit(data)}
    return SourceRows(origin, enumerate(_rows_of(data), 1), len(data))


@cache
def _answers(endpoint: str) -> bool:
    """Whether a connection to the hub can be opened. A proxy is not tried."""
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    if getproxies().get(address.scheme):
        return True
    try:
        socket.create_connection((address.hostname, port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


@contextmanager
def _offline(*settings: Any) -> Iterator[None]:
    values = [setting.HF_HUB_OFFLINE for setting in settings]
    for setting in settings:
        setting.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for setting, value in zip(settings, values, strict=True):
            setting.HF_HUB_OFFLINE = value


def local_copies(sources: Mapping[str, Source]) -> str:
    """The end of an error: how to give local copies of these parts."""
    flags = (f"--local {part}=PATH (columns {', '.join(source.columns)})" for part, source in sources.items())
    return f"Without the hub, give copies, each a file ({', '.join(FORMATS)}) or a folder: {' '.join(flags)}"


def _commit(data: Any) -> str | None:
    """The commit on the hub. It is a part of the addresses of the files that were downloaded."""
    addresses = " ".join(map(str, data.info.download_checksums or ()))
    match = re.search(r"@([0-9a-f]{40})/", addresses)
    return match and match[1]


def _rows_of(data: Any) -> Iterator[dict[str, Any]]:
    """The rows as they are stored. An image stays the content of a file, {"bytes": ..., "path": ...}."""
    for batch in data.with_format("arrow").iter(ROWS_AT_A_TIME):
        yield from batch.to_pylist()


def parse_local(words: Sequence[str], parts: Sequence[str]) -> dict[str, Path]:
    """The local copies by part, from the words PART=PATH of --local; a ConfigError if a word says something else."""
    copies = {}
    for word in words:
        part, _, path = word.partition("=")
        if part not in parts or not path:
            raise ConfigError(f"--local is {word!r}; it must be PART=PATH, where PART is one of {', '.join(parts)}")
        copies[part] = at_home(path)
        if not copies[part].exists():  # before the hub is asked for other parts
            raise ConfigError(f"--local is {word!r}; there is no such file or folder{start_of(Path(path))}")
    return copies

"""Rows of local data files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError


def local_rows(flag: str, path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a local file; ConfigError names the line that cannot be read."""
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{flag} {path}, line {number}: no valid JSON ({error.msg})") from None
                except UnicodeDecodeError:
                    raise ConfigError(f"{flag} {path}, line {number}: no valid UTF-8") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{flag} {path}, line {number}: must be a JSON object, is {type(row).__name__}")
                yield row
        return
    from datasets import load_dataset

    kind = path.suffix[1:]
    try:
        table = load_dataset(kind, data_files=str(path), split="train")
    except Exception as error:
        raise ConfigError(f"{flag} {path} cannot be read as {kind}: {' '.join(str(error).split())}") from error
    yield from table

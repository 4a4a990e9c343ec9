"""Rows of local data files, and the traces in a file. This module needs none of OpenRLHF, so the checks use it, too."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
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


def read_traces(name: str, args: SimpleNamespace | None = None) -> dict[str, str]:
    """Read a file of traces. A trace is a response of another model to a prompt, which a method trains on.

    Args:
        name: The file.
        args: Parsed arguments if the prompts are to be compared with the local training data, otherwise None.

    Returns:
        The response to each prompt. The key is the prompt as JSON, because it may be a text or a list of messages.

    Raises:
        ConfigError: There is no such file, a row is not a trace, or no trace has a prompt of the training data.
    """
    flag = "adapt.options traces"
    if not name:
        raise ConfigError(f"{flag} is not set; the method needs traces=FILE.jsonl, with columns prompt and response")
    path = Path(name).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        raise ConfigError(f"{flag} is {name}; it must be a .jsonl file that is there")
    found = _traces(local_rows(flag, path), f"{flag} {path}")
    if args is not None:
        files = [Path(file.strip().split("@")[0]).expanduser() for file in args.data.prompt_dataset.split(",")]
        rows = (row for file in files for row in local_rows("data.prompt_dataset", file))
        if not any(json.dumps(row[args.data.input_key]) in found for row in rows):
            raise ConfigError(
                f"{flag} {path} has no prompt of the training data; its prompts must be as the column "
                f"{args.data.input_key!r} (data.input_key) has them"
            )
    return found


def _traces(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, str]:
    """The traces in the rows of a file; ConfigError names the first row that is not a trace, and why."""
    traces: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        missing = [column for column in ("prompt", "response") if column not in row]
        if missing:
            raise ConfigError(f"{name}, row {number}: no column {missing[0]!r}; it has {', '.join(row) or 'none'}")
        prompt, response = row["prompt"], row["response"]
        if not (isinstance(prompt, (str, list)) and prompt):
            raise ConfigError(f"{name}, row {number}: prompt is {prompt!r}; it must be a text or a list of messages")
        if not (isinstance(response, str) and response):
            raise ConfigError(f"{name}, row {number}: response is {response!r}; it must be a text that is not empty")
        key = json.dumps(prompt)
        if key in traces:
            raise ConfigError(f"{name}, row {number}: the prompt has a trace already, in an earlier row; one is taken")
        traces[key] = response
    if not traces:
        raise ConfigError(f"{name} has no rows; it must have at least one")
    return traces

"""An evaluation's folder: settings.json, and BENCHMARK.jsonl with one line for each problem.

A line is written as soon as it is judged. The next start cuts off an incomplete last line, and resumes.
"""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bapo_openrlhf.adapt.rewards import as_range
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.preflight import check_model
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record import shapes
from bapo_openrlhf.record.durable import write_json
from bapo_openrlhf.user_file import at_home
from bapo_openrlhf.workbench.evaluation.problems import COLUMNS

SETTINGS = "settings.json"
_MODEL_FILES = (".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt", ".py")


def _is_range(value: Any) -> bool:
    try:
        as_range(value)
    except (ValueError, OverflowError):
        return False
    return True


_SETTINGS = {
    "name": shapes.text,
    "model": shapes.fields({"path": shapes.text, "files": shapes.text}),
    "sampling": shapes.fields({"runs": shapes.whole}, required=("runs",)),
    "limit": shapes.maybe(shapes.whole),
    "chat_template": shapes.anything,
    "benchmarks": shapes.map_of(shapes.fields({"reward_range": _is_range, "sha256": shapes.text})),
}
_SHAPE = shapes.fields(_SETTINGS, required=tuple(_SETTINGS))
_ROW = shapes.fields(
    {
        "id": shapes.text,
        "input": lambda value: isinstance(value, (str, list)),  # a list of messages
        "scores": shapes.list_of(lambda value: value is not None and shapes.number(value)),
        "failures": shapes.list_of(shapes.maybe(shapes.text)),
    },
    required=("id", "scores"),
)


def _is_row(value: Any) -> bool:
    return _ROW(value) and len(value.get("failures", value["scores"])) == len(value["scores"])


# ── settings ──


def files_of(model: str) -> str:
    """What tells a model's files from another checkpoint's in the same place; its name if it is on the hub."""
    check_model("model", model)
    folder = at_home(model)
    if not folder.is_dir():
        return model
    files = [path.stat() for path in folder.iterdir() if path.suffix in _MODEL_FILES and path.is_file()]
    newest = datetime.fromtimestamp(max((file.st_mtime for file in files), default=0.0), UTC)
    return f"{len(files)} files with {sum(file.st_size for file in files)} bytes, the newest of {newest.isoformat()}"


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that results with these settings may be added to a folder's; a ConfigError names the first difference.

    More benchmarks, a larger limit, and other names and paths of the same things are allowed, and another range of
    rewards, because the rows have rewards as they were given.
    """
    path = folder / SETTINGS
    if not path.is_file():
        return
    old = read_settings(folder)
    if not any((folder / f"{name}.jsonl").is_file() for name in old["benchmarks"]):
        return
    missing = [name for name in old["benchmarks"] if name not in settings["benchmarks"]]
    if missing:
        raise ConfigError(f"{path} has the benchmark {missing[0]}; name it too, or choose another folder (--out)")
    old_values, new_values = _compared(old), _compared(settings)
    if old["limit"] is not None and (settings["limit"] is None or settings["limit"] >= old["limit"]):
        del old_values["limit"]
    for name, value in old_values.items():
        if new_values.get(name) != value:
            raise ConfigError(
                f"{name} is {new_values.get(name)}, and {path} has {value}; results of the two cannot be mixed; choose "
                "another folder (--out)"
            )


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write settings.json. The folder is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, settings)


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of a folder's settings.json; a ConfigError if it is none of an evaluation."""
    path = folder / SETTINGS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {SETTINGS}; it must be the folder that `evaluate` wrote, runs/eval/NAME")
    settings = record.parsed(record.content(path) or b"")
    if not _SHAPE(settings):
        raise ConfigError(f"{path} is damaged: it must be the settings of an evaluation")
    return settings


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values of everything that must be the same. Only the limit may grow."""
    compared = {
        "limit": settings["limit"],
        "model": settings["model"].get("files"),
        "chat_template": settings["chat_template"],
        **settings["sampling"],
    }
    for name, benchmark in settings["benchmarks"].items():
        compared[f"digest of {name}'s problems"] = benchmark.get("sha256")
        compared[f"columns of {name}"] = benchmark.get("columns", [*COLUMNS])  # older ones could have no others
        compared[f"digest of {name}'s reward file"] = benchmark.get("reward_sha256")
    return compared


# ── one line for each problem ──


def read_rows(folder: Path, benchmark: str) -> dict[str, dict[str, Any]]:
    """The finished problems of a benchmark by id, without an incomplete last line; a ConfigError if another is no row.

    A row is that of `run._ask`. Of `failures`, null means that the judge gave a score; otherwise it is the kind of the
    failure, and the score is 0. Of `answers`, null is no answer, and without a function `answer` there is no list.
    """
    return {row["id"]: row for row in record.read_rows(folder / f"{benchmark}.jsonl", _is_row, "an evaluation")}


def cut_torn_line(folder: Path, benchmark: str) -> None:
    """Cut off a last line that a crash left incomplete."""
    path = folder / f"{benchmark}.jsonl"
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def append_row(folder: Path, benchmark: str, row: Mapping[str, Any]) -> None:
    """Add one problem. If the file cannot hold it, nothing of it stays, and the OSError is raised."""
    path = folder / f"{benchmark}.jsonl"
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            # A tokenizer may decode tokens to lone surrogates. json escapes them.
            file.write(json.dumps(row).encode() + b"\n")
    except OSError:
        if path.exists():
            os.truncate(path, before)
        raise

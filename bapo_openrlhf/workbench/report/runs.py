"""Runs, read from their folders."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import run_record as record

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run left; everything but its steps may be missing.

    Attributes:
        name: what the page calls it; no two runs have the same.
        about: run.json; empty for runs of older versions.
        rows: metrics.jsonl, a row a trainer step.
        groups: groups.jsonl, a row a generated group.
        answers: answers.jsonl.
        summary: summary.json; empty until the run has ended.
    """

    name: str
    rows: Sequence[Row]
    about: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Row] = ()
    answers: Sequence[Row] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """Every flag by its dotted name; empty for runs of older versions."""
        return self.about.get("config") or {}

    def fact(self, name: str) -> Any:
        """From run.json, else from summary.json, else None."""
        return self.about.get(name, self.summary.get(name))

    @property
    def last_step(self) -> int:
        """The newest step there is."""
        return max(row["step"] for row in self.rows)


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs; two of one name are told apart by their folders.

    Raises:
        ConfigError: a folder is given twice, is not there, or is no run's; or a file in it is broken.
    """
    seen: dict[Path, Path] = {}
    for folder in folders:
        if folder.resolve() in seen:
            raise ConfigError(f"run {str(folder)!r} is given twice; name each run once")
        seen[folder.resolve()] = folder
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        Run(str(folder), *_parts(run)) if names.count(run.name) > 1 else run
        for folder, run in zip(folders, runs, strict=True)
    ]


def read_run(folder: Path) -> Run:
    """Read one run.

    Raises:
        ConfigError: the folder is not there or no run's; or a file in it is broken.
    """
    if not folder.is_dir():
        raise ConfigError(f"run {str(folder)!r} is no folder; give a run's folder, runs/NAME unless --run.dir moved it")
    try:
        rows = record.read_metrics(folder)
        about, summary = record.read_run(folder), record.read_summary(folder)
        groups, answers = record.read_groups(folder), record.read_answers(folder)
    except ValueError as error:
        raise ConfigError(f"run {str(folder)!r} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(
            f"run {str(folder)!r} has no step in its {record.METRICS}; a run writes the first line after its first step"
        )
    groups = [group if is_number(group["mean"]) else {**group, "mean": None} for group in groups]
    return Run(str(about.get("name") or folder.resolve().name), rows, about, groups, answers, summary)


def _parts(run: Run) -> tuple[Any, ...]:
    return run.rows, run.about, run.groups, run.answers, run.summary

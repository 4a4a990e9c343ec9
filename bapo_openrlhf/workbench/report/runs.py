"""Runs, read from their folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.text import is_number

Row = Mapping[str, Any]
TRIPPED = "reuse/tripped_share"  # 1 / n if a gate left out the n-th optimizer step of a batch and those after it


@dataclass(frozen=True)
class Run:
    """What a run left behind, from its record (`record/run_record.py`). All but its steps may be missing."""

    name: str  # different from that of any other run of a page
    rows: Sequence[Row]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    groups: pd.DataFrame = field(default_factory=pd.DataFrame)  # of `groups_frame`
    answers: Sequence[Row] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Row] = ()  # the final one last; each has "step" and eval_DATASET_passK

    @property
    def config(self) -> Mapping[str, Any]:
        """Every flag by its dotted name."""
        return self.metadata.get("config") or {}

    @property
    def last_step(self) -> int:
        return max(row["step"] for row in self.rows)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The finite numbers of the rows by step, and "seconds" of all steps until then, if all are known."""
        numbers = [{key: float(value) for key, value in row.items() if is_number(value)} for row in self.rows]
        frame = pd.DataFrame(numbers).set_index([[row["step"] for row in self.rows]])
        seconds = frame["timing/step_total"] if "timing/step_total" in frame else pd.Series(np.nan, index=frame.index)
        return frame.assign(seconds=seconds.cumsum(skipna=False))

    def curve(self, metric: str, over: str = "step") -> pd.Series:
        """The values of a metric by step, or by another metric `over`. Steps that lack one of them are left out."""
        if metric not in self.metrics or over not in self.metrics:
            return pd.Series(dtype=float)
        pairs = self.metrics[[metric]].assign(over=self.metrics[over]).dropna()
        return pairs[metric].set_axis(pairs.index if over == "step" else pairs["over"])

    def total(self, metric: str) -> float:
        return float(self.curve(metric).sum())


def groups_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows of groups.jsonl as a frame, without those with a prefix, which do not tell how hard their prompts are."""
    rows = [row for row in rows if row.get("source") != "prefixed"]
    frame = pd.DataFrame(rows)
    return frame.assign(mean=[row["mean"] if is_number(row["mean"]) else np.nan for row in rows]) if rows else frame


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs. Those of the same name are named by folder. A ConfigError if one is no run's, or is given twice."""
    places = [folder.resolve() for folder in folders]
    for index, folder in enumerate(folders):
        if places[index] in places[:index]:
            raise ConfigError(f"run {str(folder)!r} is given twice; name each run once")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        replace(run, name=str(folder)) if names.count(run.name) > 1 else run
        for folder, run in zip(folders, runs, strict=True)
    ]


def _check_order(folder: Path, rows: Sequence[Row]) -> None:
    for number, (before, row) in enumerate(pairwise(rows), start=2):
        if row["step"] <= before["step"]:
            place = folder / record.METRICS
            raise ConfigError(f"{place}, line {number}, is damaged: step {row['step']} comes after {before['step']}")


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise ConfigError(f"run {str(folder)!r} is no folder; give a run's folder, runs/NAME unless --run.dir moved it")
    try:
        rows = record.read_metrics(folder)
        metadata, summary = record.read_run(folder), record.read_summary(folder)
        groups, answers = record.read_groups(folder), record.read_answers(folder)
        evaluations = record.read_evaluations(folder)
        _check_order(folder, rows)
    except ValueError as error:
        raise ConfigError(f"run {str(folder)!r} cannot be read: {error}") from error
    if not rows and not metadata:
        raise ConfigError(record.no_run(folder))
    if not rows:
        raise ConfigError(
            f"run {str(folder)!r} has no step in its {record.METRICS}; a run writes the first line after its first step"
        )
    name = str(metadata.get("name") or folder.resolve().name)
    return Run(name, rows, metadata, groups_frame(groups), answers, summary, evaluations)


def tokens_spared(steps: pd.DataFrame, epochs: float | np.ndarray, batch_size: float | np.ndarray) -> pd.Series:
    """Tokens that the actor did not train on in each step, because a gate ended the reuse of the batch (TRIPPED).

    The pass of the optimizer step that was left out was made. `epochs` and `batch_size` are those of the run or of each
    step.
    """
    made = 1 / steps[TRIPPED].where(steps[TRIPPED] > 0)  # optimizer steps with the last one
    of_epoch = np.ceil(steps.reindex(columns=["responses/trained", "responses/skipped"]).sum(axis=1) / batch_size)
    return (steps["tokens/trained"] * (epochs - made / of_epoch)).fillna(0.0)

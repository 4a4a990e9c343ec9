"""The runs of a study, and one table of all their steps, on which every number of the study rests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from bapo_openrlhf.workbench.pages.text import is_number
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.study.definition import Arm

FIRST = ["method", "path", "label", "seed", "step", "done"]  # the columns before the metrics


@dataclass(frozen=True)
class StudyRun:
    """One seed of an arm.

    Attributes:
        evaluations: One row per evaluation during training, the final one last. A row holds the "step", and the
            held-out accuracies as eval_BENCHMARK_passK.
    """

    arm: Arm
    seed: int
    run: Run
    evaluations: Sequence[Mapping[str, Any]] = ()

    @property
    def key(self) -> tuple[str, int]:
        """The names of the arm and the seed, which are the index of tables of runs."""
        return self.arm.name, self.seed

    @property
    def finished(self) -> bool:
        """Whether all steps are there. The last accuracy of an interrupted run is not its final accuracy."""
        planned = self.run.about.get("total_steps")
        return bool(self.run.summary) or not is_number(planned) or self.run.last_step >= planned


def steps_table(runs: Sequence[StudyRun]) -> pandas.DataFrame:
    """All steps of all runs, one row per trainer step of a run.

    Returns:
        The columns FIRST, where "done" says whether the run has ended; then, in alphabetical order, the metrics of
        docs/metrics.md and the numbers of the evaluation after that step. A value that is not there is NaN.
    """
    frames = []
    for found in runs:
        rows = pandas.DataFrame(found.run.rows)
        if found.evaluations:
            rows = rows.merge(pandas.DataFrame(found.evaluations), on="step", how="left")
        about = {"method": found.arm.method, "path": found.arm.path, "label": found.arm.label, "seed": found.seed}
        frames.append(rows.assign(**about, done=bool(found.run.summary)))
    whole = pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame(columns=FIRST)
    return whole[[*FIRST, *sorted(set(whole.columns) - set(FIRST))]]


def write_table(table: pandas.DataFrame, out: Path) -> list[Path]:
    """Write the table to OUT/table.parquet and OUT/table.csv, and return their paths."""
    paths = [out / "table.parquet", out / "table.csv"]
    table.to_parquet(paths[0], index=False)
    table.to_csv(paths[1], index=False)
    return paths

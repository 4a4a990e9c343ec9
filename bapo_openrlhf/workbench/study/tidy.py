"""A study as one table: a row a trainer step of a run, a column a metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.study.runner import Planned

KEYS = ("method", "path", "label", "seed", "step")
TABLE = "table"


def study_table(planned: Sequence[Planned]) -> pandas.DataFrame:
    """All steps of all runs that there are.

    Returns:
        KEYS, then done (whether the run has ended), the metrics of docs/metrics.md, and the numbers of the evaluation
        after that step, where there was one. What a run does not have is missing (NaN).
    """
    frames = []
    for run in planned:
        rows = pandas.DataFrame(record.read_metrics(run.folder))
        if rows.empty:
            continue
        if evaluations := record.read_evaluations(run.folder):
            rows = rows.merge(pandas.DataFrame(evaluations), on="step", how="left")
        about = {"method": run.arm.method, "path": run.arm.path, "label": run.arm.label, "seed": run.seed}
        frames.append(rows.assign(**about, done=run.done))
    if not frames:
        return pandas.DataFrame(columns=[*KEYS, "done"])
    whole = pandas.concat(frames, ignore_index=True)
    first = [*KEYS, "done"]
    return whole[[*first, *sorted(set(whole.columns) - set(first))]]


def write_table(planned: Sequence[Planned], out: Path) -> list[Path]:
    """The table as OUT/table.parquet and OUT/table.csv."""
    table = study_table(planned)
    paths = [out / f"{TABLE}.parquet", out / f"{TABLE}.csv"]
    table.to_parquet(paths[0], index=False)
    table.to_csv(paths[1], index=False)
    return paths

"""Draws what the study of SmolLM2 showed, and keeps the records of its runs.

    python research/smollm2.py RUNS --start start.csv   # writes results/smollm2/ and docs/images/smollm2.svg
    python research/smollm2.py                          # draws again, from the records in results/smollm2/

RUNS is the runs folder of the study research/studies/smollm2.yaml, with the runs of critic_smollm2.yaml in it.
`start.csv` is results.csv of an evaluation of the warmed-up model, with the temperature of the study's evaluations:
step 0 of each run. `tar -xf` of the records in an empty RUNS lets the study go on: runs that are done stay.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
from pathlib import Path

import altair as alt
import pandas as pd
from folders import DOCS_IMAGES, RESULTS

from bapo_openrlhf.record.run_record import SUMMARY, read_evaluations, read_metrics, read_run
from bapo_openrlhf.workbench.pages.colours import PALETTE
from bapo_openrlhf.workbench.pages.figure import save_svg

FOLDER = RESULTS / "smollm2"
PICTURE = DOCS_IMAGES / "smollm2.svg"
LEVELS = ("three", "four", "five", "tens", "six")
ARMS = {
    "plain-group": "GRPO", "bapo-group": "BAPO-GRPO", "plain-critic": "PPO", "bapo-critic": "BA-PPO",
    "generated-critic": "BA-PPO, a critic of all groups",
}  # fmt: skip
ORDER = {arm: place for place, arm in enumerate(ARMS.values())}
COLOURS = tuple(PALETTE[place] for place in (6, 0, 4, 1, 2))  # of ARMS
SOURCES = ("fresh", "reevaluated", "replayed")
EXPLAINED = "value/explained_variance"
OF_ALL = f"{EXPLAINED}_generated"  # of the groups that a critic of all groups trains on
# The commits whose runs have a command.json go on with them only if it is there.
KEPT = ("run.json", "metrics.jsonl", "groups.jsonl", "evaluations.jsonl", "summary.json", "command.json",
        "probes.jsonl", "solved.json")  # fmt: skip
AXES = {
    "responses": "responses generated",
    "tokens": "tokens generated and trained on",
    "hours": "hours, beside other work on the machine",
}


def rows_of(run: Path, start: dict[str, float]) -> pd.DataFrame:
    """One row for each evaluation of a run: accuracy of each level and their mean, and what it took until then."""
    metrics = pd.DataFrame(read_metrics(run)).set_index("step")
    done = pd.DataFrame(read_evaluations(run)).set_index("step")
    table = pd.DataFrame({level: 100 * done[f"eval_{level}_pass1"] for level in LEVELS})
    table["responses"] = metrics["rollouts/total"]
    table["tokens"] = metrics["tokens/generated_total"] + metrics["tokens/trained_total"]
    table["hours"] = metrics["timing/step_total"].cumsum() / 3600
    for source in SOURCES:
        table[source] = metrics[f"groups/{source}"].cumsum()
    table.loc[0] = pd.Series(start, dtype=float).reindex(table.columns, fill_value=0.0)
    table["mean"] = table[list(LEVELS)].mean(axis=1)
    if EXPLAINED in metrics:  # over the steps since the evaluation before
        explained = metrics[OF_ALL if OF_ALL in metrics else EXPLAINED]
        table["explained_variance"] = explained.groupby(-(-metrics.index // 20) * 20).mean()
    arm, _, seed = run.name.rpartition("-s")
    columns = {"arm": ARMS[arm], "seed": int(seed), "commit": read_run(run)["commit"]}
    return table.sort_index().rename_axis("step").reset_index().assign(**columns)


def ends(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each arm: the last evaluation, averaged over its seeds."""
    last = rows[rows["step"] == rows["step"].max()].groupby("arm", sort=False)
    wanted = [*LEVELS, "mean", "responses", "tokens", *SOURCES, "explained_variance"]
    means = last[[name for name in wanted if name in rows]].mean()
    return means.assign(seeds=last.size(), lowest=last["mean"].min(), highest=last["mean"].max()).reset_index()


def start_of(path: Path) -> dict[str, float]:
    """Accuracy of each level before the training, in per cent, from an evaluation's results.csv."""
    table = pd.read_csv(path)
    table = table[table["metric"].str.startswith("avg@")].set_index("benchmark")["value"]
    return {level: float(table[level]) for level in LEVELS}


def picture(rows: pd.DataFrame) -> alt.VConcatChart:
    """Mean accuracy over responses, tokens and hours: a thin line for each run, a thick one for each arm's mean."""
    arms = [arm for arm in ARMS.values() if arm in set(rows["arm"])]
    colour = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=arms, range=COLOURS[: len(arms)]),
        title=None,
        legend=alt.Legend(orient="top", columns=2, symbolOpacity=1),
    )
    means = rows.groupby(["arm", "step"], as_index=False)[["mean", *AXES]].mean()
    panels = []
    for axis, title in AXES.items():
        x = alt.X(f"{axis}:Q", title=title, axis=alt.Axis(tickCount=5))
        y = alt.Y("mean:Q", title="held-out accuracy, %", scale=alt.Scale(zero=True))
        runs = alt.Chart(rows).mark_line(strokeWidth=1, opacity=0.35).encode(x=x, y=y, color=colour, detail="seed:N")
        mean = alt.Chart(means).mark_line(strokeWidth=2.5, point=True).encode(x=x, y=y, color=colour)
        panels.append(alt.layer(runs, mean).properties(width=350, height=180))
    return alt.vconcat(*panels, title="SmolLM2-135M-Instruct on sums: mean of five levels")


def main() -> int:
    """Read the runs that are done, write the table and the picture, and keep the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", help="runs folder of the study; without it, the kept records")
    parser.add_argument("--start", type=Path, default=FOLDER / "start.csv", help="evaluation of the warmed-up model")
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    records = FOLDER / "records.tar.xz"
    if given.start != FOLDER / "start.csv":
        (FOLDER / "start.csv").write_bytes(given.start.read_bytes())
    with tempfile.TemporaryDirectory() as kept:
        if given.runs is None:
            with tarfile.open(records) as file:
                file.extractall(kept, filter="data")
        else:
            keep(given.runs, records)
        runs = sorted(path.parent for path in Path(given.runs or kept).glob(f"*/{SUMMARY}"))
        rows = pd.concat([rows_of(run, start_of(FOLDER / "start.csv")) for run in runs], ignore_index=True)
    rows = rows.sort_values(
        ["arm", "seed", "step"], key=lambda column: column.map(ORDER) if column.name == "arm" else column
    )
    rows.round(3).to_csv(FOLDER / "evaluations.csv", index=False)
    save_svg(picture(rows), PICTURE)
    print(rows.drop(columns="commit").round(1).to_string(index=False))
    print(ends(rows).round(2).to_markdown(index=False))
    return 0


def keep(runs: Path, records: Path, last: str = SUMMARY) -> None:
    """Pack the records of the runs that have the file `last`, which by default those that are done have."""
    with tarfile.open(records, "w:xz") as file:
        for run in sorted(path.parent for path in runs.glob(f"*/{last}")):
            for name in KEPT:
                if not (run / name).is_file():  # a run without evaluations has no such file
                    continue
                content = (run / name).read_bytes()
                entry = tarfile.TarInfo(f"{run.name}/{name}")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    raise SystemExit(main())

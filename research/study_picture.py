"""Draws the pictures of research/first_study.md. Each is readable at a width of 400 pixels.

python research/study_picture.py                 the final accuracies, from the tables in research/results
python research/study_picture.py runs/studies    before that, the tables and the curves, from two studies that have run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import pandas as pd
from folders import IMAGES, RESULTS

from bapo_openrlhf.workbench.pages.colours import INK, PALETTE
from bapo_openrlhf.workbench.pages.figure import save_png

WIDTH, LABELS = 400, 190  # pixels of a picture, and of the names at its left
ORDER = ("GRPO", "PPO", "BAPO-GRPO", "BA-PPO")  # the arms of a picture begin with these
STUDIES = {  # by name: the name of the picture, and the arms that have a curve
    "countdown": ("study", ("GRPO", "BAPO-GRPO", "DAPO", "PPO", "BA-PPO")),
    "countdown_methods": ("study_methods", ("GRPO", "BAPO-GRPO", "MoPPS", "DOTS", "RePO", "ReMix", "ExGRPO")),
}
GREYS = {"GRPO": "#6b6b6b", "PPO": "#a0a0a0"}
DASHED = ("PPO", "BA-PPO", "DOTS", "ReMix")


def tabulate(folder: Path, picture: str, shown: Sequence[str]) -> None:
    """Write each run's last numbers, and draw held-out accuracy over the responses generated."""
    table = pd.read_parquet(folder / "table.parquet")
    table = table[table["done"]]
    evaluations = [name for name in table.columns if name.startswith("eval_cd") and name.endswith("_pass1")]
    last = table.sort_values("step").groupby(["label", "seed"], as_index=False).last()  # of each column, nan left out
    columns = ["method", "path", "label", "seed", "step", *evaluations, "rollouts/total", "tokens/trained_total"]
    last[columns].to_csv(RESULTS / f"{folder.name}_study.csv", index=False, float_format="%.5g")

    seen = table.dropna(subset=evaluations).assign(accuracy=lambda rows: 100 * rows[evaluations].mean(axis=1))
    seen = seen[seen["label"].isin(shown)]
    curves = seen.groupby(["label", "step"], as_index=False)[["rollouts/total", "accuracy"]].median()
    drawn = _curves(curves.rename(columns={"rollouts/total": "responses"}), shown)
    save_png(drawn.properties(width=WIDTH - 60, height=300), IMAGES / f"{picture}.png")


def draw(name: str, picture: str, shown: Sequence[str]) -> None:
    """Draw the final accuracy of each run of a study, from its table in research/results."""
    last = pd.read_csv(RESULTS / f"{name}_study.csv")
    evaluations = [column for column in last.columns if column.startswith("eval_cd")]
    last["accuracy"] = 100 * last[evaluations].mean(axis=1)
    known = [label for label in ORDER if label in set(last["label"])]
    labels = list(dict.fromkeys([*known, *last["label"]]))
    assert last.groupby("label")["seed"].nunique().eq(5).all(), "the title says that every arm has five seeds"
    drawn = _final(last[["label", "accuracy"]], shown, labels)
    save_png(drawn.properties(width=WIDTH - LABELS, height=21 * len(labels)), IMAGES / f"{picture}_final.png")


def _colours(shown: Sequence[str]) -> list[str]:
    others = iter(PALETTE)
    return [GREYS.get(label) or next(others) for label in shown]


def _curves(curves: pd.DataFrame, shown: Sequence[str]) -> alt.Chart:
    """The median over the seeds, over the responses generated."""
    dashes = alt.Scale(domain=list(shown), range=[[6, 3] if label in DASHED else [] for label in shown])
    legend = alt.Legend(title=None, orient="top", columns=3, symbolType="stroke")
    return alt.Chart(curves).mark_line(point=True).encode(
        x=alt.X("responses:Q", title="responses generated", axis=alt.Axis(format="~s", tickCount=6)),
        y=alt.Y("accuracy:Q", title="held-out accuracy, % (median over the seeds)", scale=alt.Scale(zero=False)),
        color=alt.Color("label:N", scale=alt.Scale(domain=list(shown), range=_colours(shown)), legend=legend),
        strokeDash=alt.StrokeDash("label:N", scale=dashes, legend=None),
    )  # fmt: skip


def _final(last: pd.DataFrame, shown: Sequence[str], labels: Sequence[str]) -> alt.LayerChart:
    """Each seed's final accuracy as a dot, and the mean of an arm as a bar."""
    known = dict(zip(shown, _colours(shown), strict=True))
    scale = alt.Scale(domain=list(labels), range=[known.get(label, INK) for label in labels])
    axis = alt.Axis(title=None, labelLimit=LABELS, ticks=False, domain=False)
    base = alt.Chart(last).encode(
        y=alt.Y("label:N", sort=list(labels), axis=axis), color=alt.Color("label:N", scale=scale, legend=None)
    )
    title = ["final accuracy, %", "(dot: one of 5 seeds, bar: mean)"]
    x = {"title": title, "scale": alt.Scale(zero=False, padding=8), "axis": alt.Axis(tickCount=5)}
    dots = base.mark_point(filled=True, size=30, opacity=0.6)
    bars = base.mark_tick(thickness=2.5, size=14, opacity=1)
    return alt.layer(dots.encode(x=alt.X("accuracy:Q", **x)), bars.encode(x=alt.X("mean(accuracy):Q", **x)))


if __name__ == "__main__":
    for name, (picture, shown) in STUDIES.items():
        if sys.argv[1:]:
            tabulate(Path(sys.argv[1]) / name, picture, shown)
        draw(name, picture, shown)

"""Draws the pictures of docs/results.md, and writes each run's last numbers, from the tables of the two studies.

python docs/study_picture.py runs/studies
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import pandas as pd

from bapo_openrlhf.workbench.pages.colours import INK, PALETTE
from bapo_openrlhf.workbench.pages.figure import save_png

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STUDIES = {  # by name: the name of the picture, and the arms that have a curve
    "countdown": ("study", ("GRPO", "BAPO-GRPO", "DAPO", "PPO", "BA-PPO")),
    "countdown_methods": ("study_methods", ("GRPO", "BAPO-GRPO", "MoPPS", "DOTS", "RePO", "ReMix", "ExGRPO")),
}
GREYS = {"GRPO": "#6b6b6b", "PPO": "#a0a0a0"}
DASHED = ("PPO", "BA-PPO", "DOTS", "ReMix")


def draw(folder: Path, picture: str, shown: Sequence[str]) -> None:
    """Draw held-out accuracy over the responses generated and at the end; write a table with a row for each run."""
    table = pd.read_parquet(folder / "table.parquet")
    table = table[table["done"]]
    evaluations = [name for name in table.columns if name.startswith("eval_cd") and name.endswith("_pass1")]
    table["accuracy"] = 100 * table[evaluations].mean(axis=1)

    last = table.sort_values("step").groupby(["label", "seed"], as_index=False).last()  # of each column, nan left out
    columns = ["method", "path", "label", "seed", "step", *evaluations, "rollouts/total", "tokens/trained_total"]
    last[columns].to_csv(RESULTS / f"{folder.name}_study.csv", index=False, float_format="%.5g")

    seen = table.dropna(subset=evaluations)
    seen = seen[seen["label"].isin(shown)]
    curves = seen.groupby(["label", "step"], as_index=False)[["rollouts/total", "accuracy"]].median()
    curves = curves.rename(columns={"rollouts/total": "responses"})
    order = list(dict.fromkeys(table["label"]))
    names = {label: f"{label} (n = {(last['label'] == label).sum()})" for label in order}
    height = max(300, 22 * len(order))
    save_png(
        alt.hconcat(
            _curves(curves, shown).properties(width=380, height=height),
            _final(last[["label", "accuracy"]].assign(name=last["label"].map(names)), shown, list(names.values()))
            .properties(width=330, height=height),
            spacing=30,
        ).resolve_scale(color="independent"),
        Path(__file__).parent / "images" / f"{picture}.png",
    )  # fmt: skip


def _colours(shown: Sequence[str]) -> list[str]:
    others = iter(PALETTE)
    return [GREYS.get(label) or next(others) for label in shown]


def _curves(curves: pd.DataFrame, shown: Sequence[str]) -> alt.Chart:
    """The median over the seeds, over the responses generated."""
    dashes = alt.Scale(domain=list(shown), range=[[6, 3] if label in DASHED else [] for label in shown])
    legend = alt.Legend(title=None, orient="top", columns=4, symbolType="stroke")
    return alt.Chart(curves).mark_line(point=True).encode(
        x=alt.X("responses:Q", title="responses generated", axis=alt.Axis(format="~s", tickCount=6)),
        y=alt.Y("accuracy:Q", title="held-out accuracy, % (median over the seeds)", scale=alt.Scale(zero=False)),
        color=alt.Color("label:N", scale=alt.Scale(domain=list(shown), range=_colours(shown)), legend=legend),
        strokeDash=alt.StrokeDash("label:N", scale=dashes, legend=None),
    )  # fmt: skip


def _final(last: pd.DataFrame, shown: Sequence[str], names: Sequence[str]) -> alt.LayerChart:
    """Each seed's final accuracy as a dot, and the mean of an arm as a bar."""
    known = dict(zip(shown, _colours(shown), strict=True))
    labels = list(dict.fromkeys(last["label"]))
    scale = alt.Scale(domain=labels, range=[known.get(label, INK) for label in labels])
    base = alt.Chart(last).encode(
        y=alt.Y("name:N", sort=list(names), axis=alt.Axis(title=None, labelLimit=400, ticks=False, domain=False)),
        color=alt.Color("label:N", scale=scale, legend=None),
    )
    title = "final accuracy, % (dot: seed, bar: mean)"
    dots = base.mark_point(filled=True, size=30, opacity=0.6)
    bars = base.mark_tick(thickness=2.5, size=14, opacity=1)
    return alt.layer(
        dots.encode(x=alt.X("accuracy:Q", title=title, scale=alt.Scale(zero=False))),
        bars.encode(x=alt.X("mean(accuracy):Q", title=title)),
    )


if __name__ == "__main__":
    for name, (picture, shown) in STUDIES.items():
        draw(Path(sys.argv[1]) / name, picture, shown)

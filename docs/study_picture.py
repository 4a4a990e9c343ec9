"""Pictures of docs/results.md, and each run's last numbers, from the tables of the two studies.

python docs/study_picture.py runs/studies
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STUDIES = {  # by name: the picture, and the arms that have a curve
    "countdown": ("study", ("GRPO", "BAPO-GRPO", "DAPO", "PPO", "BA-PPO")),
    "countdown_methods": ("study_methods", ("GRPO", "BAPO-GRPO", "MoPPS", "DOTS", "RePO", "ReMix", "ExGRPO")),
}
GREYS = {"GRPO": "#6b6b6b", "PPO": "#a0a0a0"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
DASHED = ("PPO", "BA-PPO", "DOTS", "ReMix")


def draw(folder: Path, picture: str, shown: Sequence[str]) -> None:
    """Held-out accuracy over the responses generated, and at the end; a row a run in a table."""
    colours = GREYS | dict(zip((label for label in shown if label not in GREYS), COLOURS, strict=False))
    table = pandas.read_parquet(folder / "table.parquet")
    table = table[table["done"]]
    evaluations = [name for name in table.columns if name.startswith("eval_cd") and name.endswith("_pass1")]
    table["accuracy"] = 100 * table[evaluations].mean(axis=1)
    seen = table.dropna(subset=evaluations)
    order = [label for label in dict.fromkeys(table["label"])]

    last = table.sort_values("step").groupby(["label", "seed"], as_index=False).last()  # of each column, nan left out
    columns = ["method", "path", "label", "seed", "step", *evaluations, "rollouts/total", "tokens/trained_total"]
    last[columns].to_csv(RESULTS / f"{folder.name}_study.csv", index=False, float_format="%.5g")

    height = max(4, 0.28 * len(order))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, height), layout="constrained")
    for label in shown:
        curves = seen[seen["label"] == label].groupby("step")[["rollouts/total", "accuracy"]].median()
        style = "--" if label in DASHED else "-"
        left.plot(
            curves["rollouts/total"], curves["accuracy"], style, marker="o", ms=3, color=colours[label], label=label
        )
    left.set(xlabel="responses generated", ylabel="held-out accuracy, % (median over the seeds)")
    left.legend(frameon=False)
    for place, label in enumerate(order):
        values = last[last["label"] == label]["accuracy"]
        right.plot(values, [place] * len(values), "o", ms=4, alpha=0.6, color=colours.get(label, "#333333"))
        right.plot([values.mean()] * 2, [place - 0.3, place + 0.3], color=colours.get(label, "#333333"), lw=2)
    right.set_yticks(range(len(order)), [f"{label} (n = {(last['label'] == label).sum()})" for label in order])
    right.invert_yaxis()
    right.set(xlabel="final accuracy, % (dot: seed, bar: mean)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(Path(__file__).parent / "images" / f"{picture}.png", dpi=130)


if __name__ == "__main__":
    for name, (picture, shown) in STUDIES.items():
        draw(Path(sys.argv[1]) / name, picture, shown)

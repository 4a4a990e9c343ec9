"""docs/images/study.png, and each run's last numbers, from a study's table.

python docs/study_picture.py runs/studies/countdown benchmarks/results/countdown_study.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas

SHOWN = ("GRPO", "BAPO-GRPO", "DAPO", "PPO", "BA-PPO")
COLOURS = {"GRPO": "#6b6b6b", "BAPO-GRPO": "#0072B2", "DAPO": "#D55E00", "PPO": "#a0a0a0", "BA-PPO": "#009E73"}
STYLES = {"PPO": "--", "BA-PPO": "--"}


def main(folder: Path, runs: Path) -> None:
    """Held-out accuracy over the responses generated, and at the end; a row a run in `runs`."""
    table = pandas.read_parquet(folder / "table.parquet")
    table = table[table["done"]]
    evaluations = [name for name in table.columns if name.startswith("eval_cd") and name.endswith("_pass1")]
    table["accuracy"] = 100 * table[evaluations].mean(axis=1)
    seen = table.dropna(subset=evaluations)
    order = [label for label in dict.fromkeys(table["label"])]

    last = table.sort_values("step").groupby(["label", "seed"], as_index=False).last()  # of each column, nan left out
    columns = ["method", "path", "label", "seed", "step", *evaluations, "rollouts/total", "tokens/trained_total"]
    last[columns].to_csv(runs, index=False, float_format="%.5g")

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for label in SHOWN:
        curves = seen[seen["label"] == label].groupby("step")[["rollouts/total", "accuracy"]].median()
        style = STYLES.get(label, "-")
        left.plot(
            curves["rollouts/total"], curves["accuracy"], style, marker="o", ms=3, color=COLOURS[label], label=label
        )
    left.set(xlabel="responses generated", ylabel="held-out accuracy, % (median over the seeds)")
    left.legend(frameon=False)
    for place, label in enumerate(order):
        values = last[last["label"] == label]["accuracy"]
        right.plot(values, [place] * len(values), "o", ms=4, alpha=0.6, color=COLOURS.get(label, "#333333"))
        right.plot([values.mean()] * 2, [place - 0.3, place + 0.3], color=COLOURS.get(label, "#333333"), lw=2)
    right.set_yticks(range(len(order)), [f"{label} (n = {(last['label'] == label).sum()})" for label in order])
    right.invert_yaxis()
    right.set(xlabel="final accuracy, % (dot: seed, bar: mean)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(Path(__file__).parent / "images" / "study.png", dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

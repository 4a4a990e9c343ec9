"""One run as a picture and as a table: what the reward did, and what the batches were made of."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.run_record import METRICS, REWARD, SOURCES, read_metrics, read_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

PICTURE = "run.png"

# Okabe and Ito's colours: told apart with any colour vision, and by lightness in grey.
COLOURS = {"fresh": "#0072B2", "reevaluated": "#E69F00", "replayed": "#56B4E9"}
LABELS = {"fresh": "fresh (X1)", "reevaluated": "re-evaluated (X2)", "replayed": "replayed (X3)"}
LINE, FAINT = "#D55E00", "#A6A6A6"
MAX_BARS = 300


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred moving average over `width` steps; at the ends over those that exist. Same length as `values`."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def make_figure(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], name: str) -> Figure:
    """The figure of `plot_run`: the reward above, the batch composition below, over the same steps.

    Args:
        rows: as `record.read_metrics` gives them, at least one.
        summary: summary.json, for algorithm and seed; may be empty.
        name: of the run, for the title.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # No pyplot: it picks a display and keeps every figure; a bare Figure saves with Agg.
    figure = Figure(figsize=(10, 6.4), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    _draw_reward(top, rows)
    _draw_composition(bottom, rows)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    bottom.set_xlabel("trainer step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    facts = [str(summary["algorithm"])] if summary.get("algorithm") else []
    facts += [f"seed {summary['seed']}"] if summary.get("seed") is not None else []
    figure.suptitle(" · ".join([name, *facts]), fontsize=14)
    return figure


def _draw_reward(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    known = [(row["step"], row[REWARD]) for row in rows if row.get(REWARD) is not None]
    axes.set_ylabel("mean reward per response\n(fresh groups)")
    if not known:
        return
    steps, reward = zip(*known, strict=True)
    width = max(3, len(reward) // 10) | 1
    axes.plot(steps, reward, color=FAINT, linewidth=0.9, marker="." if len(reward) < 12 else None, label="each step")
    axes.plot(steps, smooth(reward, width), color=LINE, linewidth=2.4, label=f"mean of {width} steps")
    axes.legend(loc="best", frameon=False)


def _draw_composition(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    # More bars than this are narrower than two pixels: then one bar is the mean of several steps.
    together = math.ceil(len(rows) / MAX_BARS)
    chunks = [rows[i : i + together] for i in range(0, len(rows), together)]
    steps = [_mean_of(chunk, "step") for chunk in chunks]
    heights = [0.0] * len(chunks)
    for source in SOURCES:
        counts = [_mean_of(chunk, f"groups/{source}") or 0.0 for chunk in chunks]
        axes.bar(steps, counts, bottom=heights, width=0.85 * together, color=COLOURS[source], label=LABELS[source])
        heights = [height + count for height, count in zip(heights, counts, strict=True)]
    capacity = [(step, _mean_of(chunk, "groups/capacity")) for step, chunk in zip(steps, chunks, strict=True)]
    capacity = [(step, value) for step, value in capacity if value is not None]
    if capacity:
        (first, start), (last, end) = capacity[0], capacity[-1]  # the line spans the bars, also when there is one
        capacity = [(first - together / 2, start), *capacity, (last + together / 2, end)]
        axes.step(*zip(*capacity, strict=True), where="mid", color="black", linestyle="--", label="batch capacity")
    top = max(1.0, *heights, *(value for _, value in capacity))
    axes.set_ylim(0, 1.25 * top)  # room for the legend above the bars
    axes.set_ylabel("groups in a training batch" + (f"\n(mean of {together} steps)" if together > 1 else ""))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper center", ncols=4, frameon=False)


def plot_run(directory: str | os.PathLike, path: str | os.PathLike | None = None) -> Path:
    """Draw a run from its metrics.jsonl, also one that is still going on; returns the PNG's path.

    Args:
        directory: the run's folder.
        path: of the PNG; default DIRECTORY/run.png.

    Raises:
        ConfigError: the folder has no rows to draw.
    """
    directory = Path(directory)
    rows = read_metrics(directory)
    if not rows:
        raise ConfigError(f"run folder {str(directory)!r} has no step in its {METRICS}; give the folder of a run")
    path = directory / PICTURE if path is None else Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    make_figure(rows, read_summary(directory), directory.resolve().name).savefig(path, format="png")
    return path


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A run's summary for the terminal: reward at start and end, groups used by source, rollouts, seconds."""
    from rich.table import Table

    title = " · ".join(
        str(part)
        for part in (summary.get("algorithm"), f"seed {summary['seed']}" if "seed" in summary else None)
        if part
    )
    table = Table(title=title or None, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    start, end = summary.get("reward_start"), summary.get("reward_end")
    table.add_row("trainer steps", f"{summary.get('steps', 0):,}")
    table.add_row("reward, first steps", _number(start))
    table.add_row("reward, last steps", _number(end))
    if start is not None and end is not None:
        table.add_row("change", f"{end - start:+.3f}", end_section=True)
    groups = summary.get("groups", {})
    total = sum(groups.values())
    for source in SOURCES:
        count = groups.get(source, 0)
        share = f"  ({count / total:4.0%})" if total else ""
        table.add_row(f"groups trained on, {LABELS[source]}", f"{count:,}{share}", end_section=source == SOURCES[-1])
    table.add_row("rollouts generated (responses)", f"{summary.get('rollouts', 0):,}", end_section=True)
    for phase, seconds in summary.get("seconds", {}).items():
        table.add_row(f"seconds, {phase.replace('_', ' ')}", f"{seconds:,.1f}")
    return table


def _mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

"""One run as a picture and as tables: held-out accuracy, the reward, and what the batches were made of.

`python examples/quickstart/picture.py RUN` draws the picture of a run again: RUN/run.png. A second name is that of
another file. With the ending .svg the picture follows the reader's theme, light or dark.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import altair as alt
import pandas as pd
from rich.table import Table

from bapo_openrlhf.adapt.vocabulary import shown_sources
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.pages.charts import Key
from bapo_openrlhf.workbench.pages.colours import INK, MUTED, SOURCE_LABELS
from bapo_openrlhf.workbench.pages.figure import Figure, save_png, save_svg
from bapo_openrlhf.workbench.pages.text import clean, duration
from bapo_openrlhf.workbench.report.figures import Comparison, composition, held_out, reward
from bapo_openrlhf.workbench.report.runs import Run, read_run

PICTURE = "run.png"
WIDTH, HEIGHT = 350, 210  # of a chart without its axes, so that the picture is readable at 400 pixels
LINE = 62  # characters of a line of words


def plot_run(directory: str | os.PathLike, path: str | os.PathLike | None = None, before: float | None = None) -> Path:
    """Draw a run from its record. The run may still be going on. Returns the path of the file.

    Args:
        directory: The run's folder.
        path: The PNG or SVG file; by default DIRECTORY/run.png.
        before: Mean reward of the base model on the first held-out data set.

    Raises:
        ConfigError: The folder is no run's, or has no step to draw.
    """
    path = Path(directory) / PICTURE if path is None else Path(path)
    save = save_svg if path.suffix == ".svg" else save_png
    save(picture(with_beginning(read_run(Path(directory)), before)), path)
    return path


def with_beginning(run: Run, before: float | None) -> Run:
    """The run with an evaluation of its base model, as that of step 0."""
    if before is None or not run.evaluations:
        return run
    name = next(name for name in run.evaluations[0] if name.endswith("_pass1"))
    return replace(run, evaluations=[{"step": 0, name: before}, *run.evaluations])


def picture(run: Run) -> alt.VConcatChart:
    """Held-out accuracy, if there is some, the reward and the batch composition, over the same steps."""
    page = Comparison([run])
    algorithm, seed = (run.metadata.get(name) for name in ("algorithm", "seed"))
    facts = [str(algorithm)] if algorithm else []
    facts += [f"seed {seed}"] if seed is not None else []
    return stacked([*held_out(page), reward(page), *composition(page)], " · ".join([run.name, *facts]))


def stacked(figures: Sequence[Figure], heading: str) -> alt.VConcatChart:
    """Figures below each other with their words and legends, as one chart."""
    title = {"anchor": "start", "fontSize": 14, "subtitleFontSize": 12, "color": INK, "subtitleColor": MUTED}
    parts = []
    for figure in figures:
        words = alt.Title(
            figure.title,
            subtitle=[line for line in wrap(figure.sentence, LINE)],
            **title,
        )
        chart = figure.chart or alt.Chart(pd.DataFrame()).mark_point()
        drawn = chart.properties(width=WIDTH, height=HEIGHT)
        legend = [_legend(figure.keys)] if figure.keys else []
        parts.append(alt.vconcat(*legend, drawn, title=words))
    page = alt.vconcat(*parts, spacing=28, title=alt.Title(clean(heading), offset=16, **{**title, "fontSize": 18}))
    return page.resolve_scale(color="independent", strokeDash="independent").properties(padding=15)


def _legend(keys: Sequence[Key]) -> alt.LayerChart:
    """The legend as lines of samples and names."""
    place, line, layers = 0.0, 0, []
    at = {"scale": alt.Scale(domain=[0, WIDTH]), "axis": None}
    for key in keys:
        wide = 48 + 6.5 * len(key.name)
        if place and place + wide > WIDTH + 30:
            place, line = 0.0, line + 1
        y = alt.value(7 + 18 * line)
        data = pd.DataFrame({"left": [place], "right": [place + 22], "name": [clean(key.name)], "text": [place + 28]})
        area = key.shape == "area"
        dash = [int(part) for part in key.dash.split()]
        sample = alt.Chart(data).mark_rule(color=key.colour, strokeWidth=11 if area else 3, strokeDash=dash)
        layers.append(sample.encode(x=alt.X("left:Q", **at), x2="right:Q", y=y))
        name = alt.Chart(data).mark_text(align="left", fontSize=12, color=INK)
        layers.append(name.encode(x=alt.X("text:Q", **at), y=y, text="name:N"))
        place += wide
    return alt.layer(*layers).properties(width=WIDTH, height=14 + 18 * line)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A run's summary for the terminal: reward at start and end, groups used by source, rollouts, times."""
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
    for source in shown_sources(groups):
        label, count = SOURCE_LABELS[source], groups.get(source, 0)
        share = f"  ({count / total:4.0%})" if total else ""
        table.add_row(f"groups trained on, {label}", f"{count:,}{share}", end_section=source == "replayed")
    table.add_row("rollouts generated (responses)", f"{summary.get('rollouts', 0):,}", end_section=True)
    for phase, seconds in summary.get("seconds", {}).items():
        table.add_row(f"time, {phase.replace('_', ' ')}", duration(seconds))
    return table


def answers_table(directory: str | os.PathLike) -> Table | None:
    """A prompt that failed as the run began, with an answer from then and one from later; None without any."""
    answers = read_run(Path(directory)).answers
    failed = {row["prompt"]: row for row in reversed(answers) if row["kind"] == "failed"}
    solved = [row for row in answers if row["kind"] == "solved" and row["prompt"] in failed]
    if not solved:
        return None
    later = max(solved, key=lambda row: row["step"] - failed[row["prompt"]]["step"])  # the longest way
    first = failed[later["prompt"]]
    table = Table(title=f"{first['text']} (label {first['label']})", title_justify="left", show_header=False)
    for row in (first, later):
        table.add_row(f"step {row['step']}", clean(row["response"]), _number(row["reward"]))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/quickstart/picture.py RUN [PICTURE]")
    try:
        print(plot_run(*sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")

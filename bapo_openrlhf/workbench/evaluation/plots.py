"""An evaluation and a comparison as pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from bapo_openrlhf.workbench.evaluation import paper
from bapo_openrlhf.workbench.evaluation.paper import Block
from bapo_openrlhf.workbench.pages.colours import INK, PALETTE
from bapo_openrlhf.workbench.pages.figure import save_png

RUN, GAIN, LOSS = PALETTE[1], PALETTE[0], PALETTE[1]
ACROSS = 8  # If there are more benchmarks and averages, the first panel has a row of its own.
# What a mark stands for, and its shape. The base model's is a flat bar.
SHAPES = {
    "this run": "circle", "base model": "M-1.6-.25H1.6V.25H-1.6Z", paper.GRPO: "triangle-up", paper.DAPO: "square",
    paper.BAPO: "diamond", "other rows": "cross",
}  # fmt: skip
SLOTS = ("smaller base model", "base model", "this run")  # The columns of a benchmark, from the left.
# The model that a mark belongs to, and its colour.
MODELS = {"this run": RUN, "smaller base model": PALETTE[5], "base model": PALETTE[0], "other rows": PALETTE[6]}


def draw_results(results: Mapping[str, Any], path: Path) -> None:
    """Draw this run's averages with their intervals next to the paper's rows.

    Benchmarks that the paper does not have get a panel of their own.
    """
    found = results["benchmarks"]
    panels: list[tuple[Block | None, list[str]]] = []
    for block in paper.blocks_with(found):
        names = [name for name in block.benchmarks if name in found]
        panels.append((block, names + [block.average] * (block.title in results["averages"])))
    if own := [name for name in found if name not in paper.BENCHMARKS]:
        panels.append((None, own))
    rows = [panels[:1], panels[1:]] if sum(len(names) for _, names in panels) > ACROSS else [panels]
    # A panel with one base model has fewer columns for each benchmark, so the panels do not share their offsets.
    drawn = [
        alt.hconcat(*(results_panel(results, *panel) for panel in row), spacing=35).resolve_scale(xOffset="independent")
        for row in rows
        if row
    ]
    title = alt.Title(f"{results['name']}: average score, 95 % interval over problems", fontSize=16)
    save_png(alt.vconcat(*drawn, title=title, spacing=25).resolve_scale(xOffset="independent"), path)


def results_panel(results: Mapping[str, Any], block: Block | None, names: Sequence[str]) -> alt.LayerChart:
    """A block of the paper's table with this run, or (None) benchmarks that the paper does not have."""
    found, runs = results["benchmarks"], results["settings"]["sampling"]["runs"]
    rows = []
    for name in names:
        entry = found.get(name)
        value = entry["metrics"][f"avg@{runs}"] if entry else results["averages"][block.title]  # type: ignore[union-attr]
        head = block.benchmarks.get(name, name) if block else entry["title"]  # type: ignore[index]
        if entry and entry["problems"] < entry["in_file"]:
            head += f"\n({entry['problems']} of {entry['in_file']} problems)"
        run = dict.fromkeys(("slot", "mark", "model"), "this run")
        rows.append({"head": head, **run, "text": f"{value['value']:.1f}", **value})
    own, marks = pd.DataFrame(rows), pd.DataFrame(rows + _paper_marks(block, names, [row["head"] for row in rows]))
    slots = [slot for slot in SLOTS if slot in set(marks["slot"])]
    axis = alt.Axis(title=None, labelAngle=0, ticks=False, grid=False, labelColor=INK)
    axis.labelExpr = "split(datum.label, '\\n')"
    places = {
        "x": alt.X("head:N", sort=None, axis=axis),
        "xOffset": alt.XOffset("slot:N", sort=slots, scale=alt.Scale(domain=slots)),
    }
    score = f"avg@{runs}" + (f" (paper: avg@{paper.RUNS})" if block else "") + ", percent"
    y = alt.Y("value:Q", title=score, scale=alt.Scale(domain=[0, 100]))
    bar = alt.Chart(own).mark_bar(color=RUN, opacity=0.3, width=24).encode(**places, y=y)
    ends = alt.Chart(own).mark_rule(color=RUN, strokeWidth=2).encode(**places, y="low:Q", y2="high:Q")
    named = {mark: f"paper: {mark.split(' (')[0]}" for mark in SHAPES} | {"this run": f"this run: {results['name']}"}
    sizes = {"smaller base model": "smaller base model", "base model": "larger base model"}
    of_paper = paper.blocks_with(found)
    sized = any(len({row.base for row in block.rows}) > 1 for block in of_paper)
    points = (
        alt.Chart(marks)
        .mark_point(filled=True, opacity=1, size=50)
        .encode(
            **places,
            y=y,
            shape=alt.Shape("mark:N", scale=_scale(SHAPES), legend=_legend(named) if of_paper else None),
            color=alt.Color("model:N", scale=_scale(MODELS), legend=_legend(sizes) if sized else None),
        )
    )
    above = alt.Chart(own).mark_text(color=RUN, dy=-7).encode(**places, y="high:Q", text="text:N")
    title = f"{block.title} (Table {block.part})" if block else "not in the paper"
    return alt.layer(bar, ends, points, above, title=title).properties(
        width=alt.Step(105, **{"for": "position"}), height=300
    )


def _scale(known: Mapping[str, str]) -> alt.Scale:
    return alt.Scale(domain=list(known), range=list(known.values()))


def _legend(named: Mapping[str, str]) -> alt.Legend:
    """A legend of some values with other names."""
    legend = alt.Legend(orient="bottom", title=None, columns=3, values=list(named))
    legend.labelExpr = f"{json.dumps(named)}[datum.label]"
    return legend


def _paper_marks(block: Block | None, names: Sequence[str], heads: Sequence[str]) -> list[dict[str, Any]]:
    """A mark for each of the paper's rows and each benchmark. Each base model has a column of its own."""
    if block is None:
        return []
    marks, bases = [], list(dict.fromkeys(row.base for row in block.rows))
    for row in block.rows:
        values = dict(zip((*block.benchmarks, block.average), (*row.values, row.average), strict=True))
        base = "smaller base model" if row.base != bases[-1] else "base model"
        mark = "base model" if row.method == row.base else row.method if row.method in SHAPES else "other rows"
        model = "other rows" if mark == "other rows" else base
        for name, head in zip(names, heads, strict=True):
            marks.append({"head": head, "slot": base, "mark": mark, "model": model, "value": values[name]})
    return marks


def draw_comparison(result: Mapping[str, Any], path: Path) -> None:
    """Draw each problem's difference B - A in order: how much was gained and lost, and by how many problems."""
    panels = [comparison_panel(entry) for entry in result["benchmarks"].values()]
    title = alt.Title(
        f"{result['b']['name']} (B) compared with {result['a']['name']} (A)",
        subtitle=f"dashed: mean difference; grey: {result['interval']}",
        fontSize=16,
    )
    columns = 1 if len(panels) < 3 else 3  # two below each other can be read on a narrow screen
    save_png(alt.concat(*panels, columns=columns, title=title, spacing=30), path)


def comparison_panel(entry: Mapping[str, Any]) -> alt.LayerChart:
    """The differences of one benchmark, from the largest gain to the largest loss."""
    values = sorted(entry["differences"].values(), reverse=True)
    mean = entry["avg"]["difference"]
    better, worse = sum(value > 0 for value in values), sum(value < 0 for value in values)
    title = [
        f"{entry['title']}: {mean['value']:+.2f} [{mean['low']:+.2f}, {mean['high']:+.2f}]",
        f"of {len(values)} problems {better} better, {len(values) - better - worse} equal, {worse} worse",
    ]
    x = alt.X("left:Q", title="problems, sorted", axis=alt.Axis(grid=False, tickMinStep=1, format="d"),
              scale=alt.Scale(domain=[0.5, len(values) + 0.5], nice=False))  # fmt: skip
    y = alt.Y("value:Q", title="avg, B - A, points", scale=alt.Scale(domain=[-105, 105], nice=False))
    data = pd.DataFrame({"value": values})
    data = data.assign(left=data.index + 0.5, right=data.index + 1.5)
    bars = alt.Chart(data[data["value"] != 0]).mark_rect().encode(
        x=x, x2="right:Q", y=y, y2=alt.datum(0),
        color=alt.condition("datum.value > 0", alt.value(GAIN), alt.value(LOSS)),
    )  # fmt: skip
    average = alt.Chart(pd.DataFrame([mean]))
    band = average.mark_rect(color=INK, opacity=0.12).encode(y="low:Q", y2="high:Q")
    line = average.mark_rule(color=INK, strokeDash=[5, 3]).encode(y="value:Q")
    zero = alt.Chart(data.head(1)).mark_rule(color=INK, strokeWidth=0.8).encode(y=alt.YDatum(0))
    return alt.layer(bars, band, line, zero, title=alt.Title(title, fontSize=12)).properties(width=300, height=260)

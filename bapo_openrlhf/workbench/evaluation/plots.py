"""An evaluation and a comparison as pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_openrlhf.workbench.evaluation import paper
from bapo_openrlhf.workbench.evaluation.paper import Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with any colour vision, and by lightness in grey.
RUN, GAIN, LOSS = "#D55E00", "#0072B2", "#D55E00"
BASES = ("#56B4E9", "#0072B2")  # the smaller base model, the larger one
MARKERS = {paper.GRPO: "o", paper.DAPO: "s", paper.BAPO: "D"}
FAINT = "#A6A6A6"


def draw_results(results: Mapping[str, Any], path: Path) -> None:
    """This run's averages with their intervals beside the paper's rows; benchmarks of one's own on their own."""
    found = results["benchmarks"]
    blocks = [block for block in paper.BLOCKS if any(name in found for name in block.benchmarks)]
    panels: list[tuple[Block | None, list[str]]] = [(block, _columns(results, block)) for block in blocks]
    if own := [name for name in found if name not in paper.BENCHMARKS]:
        panels.append((None, own))
    rows = [panels[:1], panels[1:]] if sum(len(names) for _, names in panels) > 8 else [panels]
    rows = [row for row in rows if row]
    widest = max(sum(len(names) + 0.7 for _, names in row) for row in rows)
    figure = _figure(1.4 * widest, 0.9 + 4.2 * len(rows))
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        ratios = [len(names) + 0.7 for _, names in row]
        for axes, (block, names) in zip(
            part.subplots(1, len(row), width_ratios=ratios, squeeze=False)[0], row, strict=True
        ):
            _draw_panel(axes, results, block, names)
    _legend(figure, results, blocks)
    figure.suptitle(f"{results['name']}: average score, 95 % interval over problems", fontsize=13)
    figure.savefig(path, format="png")


def _columns(results: Mapping[str, Any], block: Block) -> list[str]:
    """Benchmarks of a block that were run, and its average where it is known."""
    return [name for name in block.benchmarks if name in results["benchmarks"]] + (
        [block.average] if block.title in results["averages"] else []
    )


def _draw_panel(axes: Axes, results: Mapping[str, Any], block: Block | None, names: Sequence[str]) -> None:
    """One block of the paper's table, or (None) benchmarks that it has not."""
    found, runs = results["benchmarks"], results["settings"]["sampling"]["runs"]
    if block is None:
        heads, offset = {name: found[name]["title"] for name in names}, 0.0
        axes.set_title("not in the paper", fontsize=11)
    else:
        heads, offset = block.benchmarks, 0.2
        axes.set_title(f"{block.title} (Table {block.part})", fontsize=11)
        _draw_paper(axes, block, names)
    estimates = [
        found[name]["metrics"][f"avg@{runs}"] if name in found else results["averages"][block.title] for name in names
    ]
    shares = {
        name: f"\n({entry['problems']} of {entry['in_file']} problems)"
        for name, entry in found.items()
        if entry["problems"] < entry["in_file"]
    }
    _draw_run(axes, [heads.get(name, name) + shares.get(name, "") for name in names], estimates, offset)
    axes.set_ylabel(f"avg@{runs}" + (f" (paper: avg@{paper.RUNS})" if block else "") + ", percent")


def _draw_paper(axes: Axes, block: Block, names: Sequence[str]) -> None:
    """A mark for each of the paper's rows; each base model and what was made of it in a column of its own."""
    bases = list(dict.fromkeys(row.base for row in block.rows))
    order = [*block.benchmarks, block.average]
    for row in block.rows:
        values = [(*row.values, row.average)[order.index(name)] for name in names]
        place = np.arange(len(names)) - 0.22 + 0.16 * bases.index(row.base)
        axes.plot(place, values, linestyle="none", zorder=3, **_style(row, bases))


def _style(row: paper.Row, bases: Sequence[str]) -> dict[str, Any]:
    colour = BASES[bases.index(row.base)] if len(bases) > 1 else BASES[1]
    if row.method == row.base:
        return {"marker": "_", "color": colour, "markersize": 14, "markeredgewidth": 2.2}
    if row.method in MARKERS:
        return {"marker": MARKERS[row.method], "color": colour, "markersize": 6.5}
    return {"marker": ".", "color": FAINT, "markersize": 7}


def _draw_run(axes: Axes, heads: Sequence[str], estimates: Sequence[Mapping[str, float]], offset: float) -> None:
    place = np.arange(len(heads)) + offset
    values = np.array([estimate["value"] for estimate in estimates])
    low = values - [estimate["low"] for estimate in estimates]
    high = [estimate["high"] for estimate in estimates] - values
    axes.bar(place, values, width=0.3, color=RUN, alpha=0.3, zorder=2)
    axes.errorbar(place, values, [low, high], fmt="o", color=RUN, capsize=4, markersize=5, linewidth=1.8, zorder=4)
    for x, estimate in zip(place, estimates, strict=True):
        above = estimate["high"] + 1.5 < 94
        y = estimate["high"] + 1.5 if above else estimate["low"] - 1.5
        text = f"{estimate['value']:.1f}"
        axes.text(x, y, text, ha="center", va="bottom" if above else "top", fontsize=9, color=RUN, zorder=5)
    axes.set_xticks(np.arange(len(heads)), heads)
    axes.set_xlim(-0.6, len(heads) - 0.4)
    axes.set_ylim(0, 100)
    _tidy(axes)


def _legend(figure: Figure, results: Mapping[str, Any], blocks: Sequence[Block]) -> None:
    from matplotlib.lines import Line2D

    def mark(label: str, **style: Any) -> Line2D:
        return Line2D([], [], linestyle="none", label=label, **style)

    marks = [mark(f"this run: {results['name']}", marker="o", color=RUN)]
    if blocks:
        marks += [mark("paper: base model", marker="_", color=BASES[1], markersize=14, markeredgewidth=2.2)]
        for method, marker in MARKERS.items():
            marks.append(mark(f"paper: {method.split(' ')[0]}", marker=marker, color=BASES[1], markersize=6.5))
        marks += [mark("paper: other rows", marker=".", color=FAINT, markersize=7)]
    if any(len({row.base for row in block.rows}) > 1 for block in blocks):
        marks += [mark("smaller base model", marker="s", color=BASES[0]), mark("larger", marker="s", color=BASES[1])]
    figure.legend(handles=marks, loc="outside lower center", ncols=min(4, len(marks)), frameon=False, fontsize=9)


def draw_comparison(result: Mapping[str, Any], path: Path) -> None:
    """Each problem's difference B - A, sorted: how much was gained and lost, and by how many problems."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = list(result["benchmarks"].values())
    across = min(3, len(entries))
    down = math.ceil(len(entries) / across)
    figure = _figure(4.6 * across, 3.8 * down + 0.6)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, entry in zip(panels, entries, strict=False):
        _draw_differences(axes, entry)
    for axes in panels[len(entries) :]:
        axes.set_visible(False)
    handles = [
        Line2D([], [], color="black", linestyle="--", label="mean"),
        Patch(color="#DFDFDF", label=result["interval"]),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"{result['b']['name']} (B) compared with {result['a']['name']} (A)", fontsize=13)
    figure.savefig(path, format="png")


def _draw_differences(axes: Axes, entry: Mapping[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    values = np.sort(np.array(list(entry["differences"].values())))[::-1]
    place = np.arange(1, len(values) + 1)
    for colour, side in ((GAIN, values > 0), (LOSS, values < 0)):
        axes.bar(place[side], values[side], width=1.0, color=colour)
    mean = entry["avg"]["difference"]
    better, equal, worse = (int(np.sum(side)) for side in (values > 0, values == 0, values < 0))
    axes.axhspan(mean["low"], mean["high"], color="black", alpha=0.12, linewidth=0)
    axes.axhline(mean["value"], color="black", linestyle="--", linewidth=1.2)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_title(
        f"{entry['title']}: {mean['value']:+.2f} [{mean['low']:+.2f}, {mean['high']:+.2f}]\n"
        f"of {len(values)} problems {better} better, {equal} equal, {worse} worse",
        fontsize=10,
    )
    axes.set_xlabel("problems, sorted")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("avg, B - A, points")
    axes.set_xlim(0.5, len(values) + 0.5)
    axes.set_ylim(-105, 105)
    _tidy(axes)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    # No pyplot: it picks a display and keeps every figure; a bare Figure saves with Agg.
    return Figure(figsize=(max(width, 8.5), height), dpi=120, layout="constrained")


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)

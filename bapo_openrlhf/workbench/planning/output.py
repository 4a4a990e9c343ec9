"""A plan as tables and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_openrlhf.workbench.planning.constants import GIB
from bapo_openrlhf.workbench.planning.memory import REASONS
from bapo_openrlhf.workbench.planning.plan import Entry, Plan, as_json
from bapo_openrlhf.workbench.planning.times import PHASES
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with any colour vision; each algorithm has a marker of its own too.
STYLES = {
    "GRPO": ("#000000", "o"),
    "PPO": ("#0072B2", "s"),
    "DAPO": ("#E69F00", "^"),
    "BAPO-GRPO": ("#D55E00", "D"),
    "BA-PPO": ("#009E73", "v"),
}
NAMES = tuple(algorithm.name for algorithm in ALGORITHMS)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are also aligned in a terminal."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float) -> str:
    """Three significant digits, without an exponent; thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gib(value: float) -> str:
    """Bytes in GiB."""
    return number(value / GIB)


def page(plan: Plan) -> str:
    """The whole plan as Markdown, which a terminal shows as well."""
    parts = [
        "# Plan: predicted, not measured\n",
        f"{plan.gpu}, {plan.steps} trainer steps. All numbers are predictions from the flags and from the constants at "
        "the end; no model was loaded and nothing was timed.\n",
        "## Groups of an average step, responses, tokens\n",
        _groups(plan),
        "## Predicted seconds a step\n",
        *(_seconds(plan, shape.name) for shape in plan.shapes),
        _words(plan),
        "## Predicted seconds a step by phase, on the fewest GPUs that fit\n",
        _phases(plan),
        "## Predicted GiB on the fullest GPU: while generating / while training\n",
        *(_memory(plan, shape.name) for shape in plan.shapes),
        "## Predicted buffers and weight sync\n",
        _traffic(plan),
        "## Constants\n",
        table(
            ("name", "value", "unit", "meaning", "source"),
            [
                (name, f"{value:g}", unit, meaning, source)
                for name, value, unit, meaning, source in plan.constants.rows()
            ],
        ),
    ]
    return "\n".join(parts)


def _groups(plan: Plan) -> str:
    first = plan.entries[: len(NAMES)]
    base = first[0].rollouts
    head = ("method", "fresh", "again", "X1", "X2", "X3", "trained", "responses", "update tokens", "rollouts", "x GRPO")
    rows = []
    for e in first:
        g = e.groups
        counts = [g.fresh, g.again, g.x1, g.x2, g.x3, g.trained, e.responses, e.trained_tokens]
        rows.append((e.algorithm, *map(number, counts), number(e.rollouts), f"{e.rollouts / base:.2f}"))
    return table(head, rows) + f'\n"rollouts" are the responses of all {plan.steps} steps.\n'


def _gpus(plan: Plan) -> list[int]:
    return list(dict.fromkeys(e.gpus for e in plan.entries))


def _seconds(plan: Plan, model: str) -> str:
    rows = []
    for gpus in _gpus(plan):
        found = [plan.entry(model, gpus, name) for name in NAMES]
        cells = [number(e.step_seconds) if e.step_seconds is not None else e.memory.word for e in found]
        rows.append((model, str(gpus), str(found[0].tensor_parallel or "-"), *cells))
    return table(("model", "GPUs", "GPUs an engine", *NAMES), rows)


def _words(plan: Plan) -> str:
    words = dict.fromkeys(e.memory.word for e in plan.entries if e.memory.word != "fits")
    return "".join(f"- {word}: {REASONS[word]}\n" for word in words)


def _fewest(plan: Plan, model: str, algorithm: str) -> Entry | None:
    fitting = [e for e in plan.entries if (e.model, e.algorithm) == (model, algorithm) and e.seconds is not None]
    return min(fitting, key=lambda e: e.gpus, default=None)


def _phases(plan: Plan) -> str:
    rows = []
    for shape in plan.shapes:
        for name in NAMES:
            e = _fewest(plan, shape.name, name)
            if e is None or e.seconds is None:
                rows.append((shape.name, name, "-", *("-" for _ in PHASES), "fits none"))
            else:
                cells = [number(e.seconds[phase]) for phase in PHASES]
                rows.append((shape.name, name, str(e.gpus), *cells, number(sum(e.seconds.values()))))
    return table(("model", "method", "GPUs", *PHASES, "step"), rows)


def _memory(plan: Plan, model: str) -> str:
    rows = []
    for gpus in _gpus(plan):
        found = [plan.entry(model, gpus, name).memory for name in NAMES]
        rows.append((model, str(gpus), *(f"{gib(m.generation)} / {gib(max(m.experience, m.training))}" for m in found)))
    return table(("model", "GPUs", *NAMES), rows)


def _traffic(plan: Plan) -> str:
    rows, gpus = [], _gpus(plan)[0]
    for shape in plan.shapes:
        for name in ("GRPO", "BAPO-GRPO"):
            e = plan.entry(shape.name, gpus, name)
            rows.append((shape.name, name, str(e.syncs), gib(e.sync_bytes), gib(e.sync_bytes * e.syncs / plan.steps),
                         gib(e.sync_bytes * e.syncs), gib(e.delayed_bytes)))  # fmt: skip
    adapted = plan.entry(plan.shapes[0].name, gpus, "BAPO-GRPO")
    head = ("model", "method", "syncs", "GiB a sync", "GiB a step", "GiB in all", "GiB delayed, host, an engine")
    return table(head, rows) + (
        f"\nOn {gpus} GPUs. Replay buffer, on the host: {gib(adapted.replay_bytes)} GiB expected, "
        f"{gib(adapted.replay_bytes_most)} GiB full of the longest samples. Hard buffer, prompts alone: "
        f"{adapted.hard_bytes / 2**20:.3g} MiB full.\n"
    )


def figure(plan: Plan) -> Figure:
    """Seconds a step over GPUs: a panel a model, all on one scale, a line a algorithm; a gap where it does not fit."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    across = min(3, len(plan.shapes))
    down = -(-len(plan.shapes) // across)
    # No pyplot: it picks a display and keeps every figure; a bare Figure saves with Agg.
    drawn = Figure(figsize=(max(4 * across, 6), 3.3 * down + 0.9), dpi=120, layout="constrained")
    panels = list(drawn.subplots(down, across, squeeze=False, sharey=True).flat)
    gpus = _gpus(plan)
    for axes, shape in zip(panels, plan.shapes, strict=False):
        for name, (colour, marker) in STYLES.items():
            seconds = [plan.entry(shape.name, count, name).step_seconds for count in gpus]
            values = [float("nan") if value is None else value for value in seconds]
            axes.plot(gpus, values, color=colour, marker=marker, markersize=4.5, linewidth=1.5, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(gpus, [str(count) for count in gpus])
        axes.set_xlim(gpus[0] / 1.3, gpus[-1] * 1.3)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"GPUs ({plan.gpu})")
        axes.set_ylabel("seconds a step")
        axes.tick_params(labelleft=True)
        axes.set_title(shape.name, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
        if not any(plan.entry(shape.name, count, name).seconds for count in gpus for name in STYLES):
            axes.text(0.5, 0.5, "does not fit", ha="center", transform=axes.transAxes)
    for axes in panels[len(plan.shapes) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    drawn.suptitle("Time per trainer step, predicted", fontsize=13)
    return drawn


def write(plan: Plan, folder: Path) -> None:
    """plan.json, plan.md and plan.png in a folder, which is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(as_json(plan), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "plan.md").write_text(page(plan) + "\n![Time per step over GPUs](plan.png)\n", encoding="utf-8")
    figure(plan).savefig(folder / "plan.png", format="png")

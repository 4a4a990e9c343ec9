"""A plan as a page of tables, and as a picture."""

import json
from pathlib import Path

import altair as alt
import pandas as pd

from bapo_openrlhf.workbench.pages.colours import INK, PALETTE
from bapo_openrlhf.workbench.pages.figure import save_png
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import duration
from bapo_openrlhf.workbench.planning.constants import GIB
from bapo_openrlhf.workbench.planning.plan import Plan, as_json
from bapo_openrlhf.workbench.planning.times import OVERLAP, PHASES
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS

NAMES = tuple(algorithm.name for algorithm in ALGORITHMS)
COLOURS = (INK, PALETTE[0], PALETTE[4], PALETTE[1], PALETTE[2])  # of ALGORITHMS
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down")  # of ALGORITHMS
ACROSS = 3  # Panels in a row of the picture.


def number(value: float) -> str:
    """A number with three significant digits, without an exponent and with separated thousands."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gib(value: float) -> str:
    """Bytes in GiB."""
    return number(value / GIB)


def page(plan: Plan) -> str:
    """The whole plan as Markdown. It can also be read in a terminal."""
    words = dict.fromkeys(f"- {e.fits}: {e.why}\n" for e in plan.entries if e.fits != "fits")
    constants = pd.DataFrame(plan.constants.rows(), dtype=object)
    constants["value"] = constants["value"].map("{:g}".format)
    parts = [
        *(f"{verdict}\n" for verdict in plan.verdicts),
        "# Plan: predicted, not measured\n",
        f"{plan.gpu}, {plan.steps} trainer steps. All numbers are predictions from the flags and from the constants at "
        "the end; no model was loaded and nothing was timed.\n",
        "## Groups of an average step, responses, tokens\n",
        _groups(plan),
        "## Predicted time of a step\n",
        *(_times(plan, shape.name) for shape in plan.shapes),
        "".join(words),
        "## Predicted time of a step by phase, on the fewest GPUs that fit\n",
        _phases(plan),
        "## Predicted GiB on the fullest GPU: while generating / while training\n",
        *(_memory(plan, shape.name) for shape in plan.shapes),
        "## Predicted buffers and weight sync\n",
        _traffic(plan),
        "## Constants\n",
        Table(constants, words=5).markdown(),
    ]
    return "\n".join(parts)


def _groups(plan: Plan) -> str:
    first = plan.entries[: len(NAMES)]
    head = ("method", "fresh", "again", "X1", "X2", "X3", "trained", "responses", "update tokens", "rollouts", "x GRPO")
    rows = []
    for e in first:
        g = e.groups
        counts = [g.fresh, g.again, g.x1, g.x2, g.x3, g.trained, e.responses, e.trained_tokens, e.rollouts]
        rows.append((e.method, *map(number, counts), f"{e.rollouts / first[0].rollouts:.2f}"))
    return Table.of(head, rows).markdown() + f'\n"rollouts" are the responses of all {plan.steps} steps.\n'


def _gpus(plan: Plan) -> list[int]:
    return list(dict.fromkeys(e.gpus for e in plan.entries))


def _times(plan: Plan, model: str) -> str:
    rows = []
    for gpus in _gpus(plan):
        found = [plan.entry(model, gpus, name) for name in NAMES]
        cells = [duration(e.step_seconds) if e.step_seconds is not None else e.fits for e in found]
        rows.append((model, str(gpus), str(found[0].tensor_parallel or "-"), *cells))
    return Table.of(("model", "GPUs", "GPUs per engine", *NAMES), rows).markdown()


def _phases(plan: Plan) -> str:
    rows, columns = [], list(dict.fromkeys(phase for e in plan.entries for phase in e.seconds or PHASES))
    for shape in plan.shapes:
        for name in NAMES:
            fitting = [e for e in plan.entries if (e.model, e.method) == (shape.name, name) and e.seconds]
            e = min(fitting, key=lambda entry: entry.gpus, default=None)
            if e is None or e.seconds is None:
                rows.append((shape.name, name, "-", *("-" for _ in columns), "does not fit"))
            else:
                cells = [duration(abs(e.seconds.get(phase, 0.0))) for phase in columns]
                rows.append((shape.name, name, str(e.gpus), *cells, duration(sum(e.seconds.values()))))
    note = "\nA step takes all phases less the overlap.\n" if OVERLAP in columns else ""
    return Table.of(("model", "method", "GPUs", *columns, "step"), rows, words=2).markdown() + note


def _memory(plan: Plan, model: str) -> str:
    rows = []
    for gpus in _gpus(plan):
        found = [plan.entry(model, gpus, name).gpu_bytes for name in NAMES]
        cells = [f"{gib(size['generation'])} / {gib(max(size['experience'], size['training']))}" for size in found]
        rows.append((model, str(gpus), *cells))
    return Table.of(("model", "GPUs", *NAMES), rows).markdown()


def _traffic(plan: Plan) -> str:
    rows, gpus = [], _gpus(plan)[0]
    for shape in plan.shapes:
        for name in ("GRPO", "BAPO-GRPO"):
            e = plan.entry(shape.name, gpus, name)
            total = e.sync_bytes * e.syncs
            sizes = (e.sync_bytes, total / plan.steps, total, e.delayed_bytes_engine)
            rows.append((shape.name, name, str(e.syncs), *map(gib, sizes)))
    adapted = plan.entry(plan.shapes[0].name, gpus, "BAPO-GRPO")
    head = ("model", "method", "syncs", "GiB per sync", "GiB per step", "GiB in all", "GiB delayed, host of an engine")
    return Table.of(head, rows, words=2).markdown() + (
        f"\nOn {gpus} GPUs. Replay buffer, on the host: {gib(adapted.replay_bytes)} GiB expected, "
        f"{gib(adapted.replay_bytes_most)} GiB full of the longest samples. Hard buffer, which holds only prompts: "
        f"{adapted.hard_bytes / 2**20:.3g} MiB full.\n"
    )


def figure(plan: Plan) -> alt.ConcatChart:
    """Seconds per step over the number of GPUs: a panel for each model, and a line for each algorithm.

    All panels have the same scale. A line has a gap if the model does not fit.
    """
    rows = [(e.model, e.gpus, e.method, e.step_seconds) for e in plan.entries]
    data = pd.DataFrame(rows, columns=["model", "gpus", "algorithm", "seconds"])
    panels = [_panel(data[data["model"] == shape.name], plan.gpu, data["seconds"]) for shape in plan.shapes]
    title = alt.Title("Time per trainer step, predicted", fontSize=16, offset=14)
    return alt.concat(*panels, columns=ACROSS, title=title, spacing=25)


def _panel(data: pd.DataFrame, gpu: str, all_seconds: pd.Series) -> alt.LayerChart:
    gpus = sorted(data["gpus"].unique().tolist())
    ends = [all_seconds.min() / 1.2, all_seconds.max() * 1.2] if all_seconds.notna().any() else [1, 10]
    legend = alt.Legend(orient="bottom", title=None)
    colour = alt.Color("algorithm:N", scale=alt.Scale(domain=NAMES, range=COLOURS), legend=legend)
    shape = alt.Shape("algorithm:N", scale=alt.Scale(domain=NAMES, range=SHAPES), legend=legend)
    scale = alt.Scale(type="log", base=2, domain=[gpus[0] / 1.3, gpus[-1] * 1.3], nice=False)
    x = alt.X("gpus:Q", scale=scale, axis=alt.Axis(title=f"GPUs ({gpu})", values=gpus, format="d", grid=False))
    axis = alt.Axis(title="seconds per step", format="~g", tickCount=5)
    y = alt.Y("seconds:Q", scale=alt.Scale(type="log", domain=ends, nice=False), axis=axis)
    base = alt.Chart(data).encode(x=x, y=y, color=colour)
    layers = [base.mark_line(strokeWidth=1.5), base.mark_point(filled=True, opacity=1, size=35).encode(shape=shape)]
    if data["seconds"].isna().all():
        layers.append(alt.Chart(data.head(1)).mark_text(text="does not fit", fontSize=13, color=INK))
    return alt.layer(*layers, title=data["model"].iloc[0]).properties(width=280, height=210)


def write(plan: Plan, folder: Path) -> None:
    """Write plan.json, plan.md and plan.png. The folder is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(as_json(plan), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "plan.md").write_text(page(plan) + "\n![Time per step over GPUs](plan.png)\n", encoding="utf-8")
    save_png(figure(plan), folder / "plan.png")

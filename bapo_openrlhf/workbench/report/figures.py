"""The figures of the page: what each draws of the runs, and its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from bapo_openrlhf.record.run_record import REWARD, SOURCES
from bapo_openrlhf.workbench.pages import charts
from bapo_openrlhf.workbench.pages.charts import STEP
from bapo_openrlhf.workbench.pages.colours import (
    DASHES,
    INK,
    PALETTE,
    PHASE_LABELS,
    REASON_COLOURS,
    SOURCE_COLOURS,
    SOURCE_LABELS,
    STATE_LABELS,
    accuracy_colours,
    phase_colour,
)
from bapo_openrlhf.workbench.pages.curves import (
    Curve,
    Key,
    bin_width,
    binned,
    chunk_means,
    in_words,
    smoothed,
    smoothing_width,
    table_of,
)
from bapo_openrlhf.workbench.pages.figure import Figure
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import number
from bapo_openrlhf.workbench.report import data
from bapo_openrlhf.workbench.report.accuracy import migration, moved, passes, thirds, why_no_bins
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.report.words import WORDS, Words

MAX_POINTS = 200  # of a curve, and rows of its table

Domain = tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """The runs of a page with what their figures share: colours, axes, and how many steps a point stands for."""

    runs: Sequence[Run]

    @property
    def last_step(self) -> int:
        """The newest step of all runs."""
        return max(run.last_step for run in self.runs)

    @property
    def width(self) -> int:
        """How many steps a drawn point stands for."""
        return bin_width(self.last_step, MAX_POINTS)

    @property
    def domain(self) -> Domain:
        """The ends of an axis of steps. A run of one step has room around it."""
        return (1, self.last_step) if self.last_step > 1 else (0.5, 1.5)

    def key(self, index: int) -> Key:
        """The legend of a run. Its colour and its dashes are the same in all figures."""
        colour, dash = (values[index % len(values)] for values in (PALETTE, DASHES))
        return Key(self.runs[index].name, colour, dash)

    def label(self, run: Run) -> str:
        """What a figure of one run is called by: nothing if there is only one run."""
        return "" if len(self.runs) == 1 else run.name


# ── lines ──


def by_run(page: Comparison, metric: str, y_domain: Domain | None = None) -> Figure:
    """One metric of WORDS over the steps, with a line for each run."""
    words = WORDS[metric]
    curves = [Curve(page.key(index), run.curve(metric)) for index, run in enumerate(page.runs)]
    there = [curve for curve in curves if len(curve.values)]
    missing = _lacking(page, [curve.values for curve in curves], words.why)
    return _lines(page, there, words, missing=missing, keys=len(page.runs) > 1, y_domain=y_domain)


def by_source(page: Comparison, metric: str) -> list[Figure]:
    """A metric of WORDS with {} for the source, over the steps: a figure for each run, a line for each source."""
    keys = {
        metric.format(source): Key(SOURCE_LABELS[source], SOURCE_COLOURS[source], dash)
        for source, dash in zip(SOURCES, DASHES, strict=False)
    }
    return in_each(page, keys, metric)


def in_each(page: Comparison, metrics: dict[str, Key], about: str = "", *, log: bool = False) -> list[Figure]:
    """Several metrics over the steps: a figure for each run, all with the same axes.

    Args:
        about: The entry of WORDS; that of the first metric if empty.
    """
    words = WORDS[about or next(iter(metrics))]
    curves = [[Curve(key, run.curve(metric)) for metric, key in metrics.items()] for run in page.runs]
    there = [[curve for curve in of_run if len(curve.values)] for of_run in curves]
    values = [value for of_run in there for curve in of_run for value in _drawn(page, curve, words).values]
    y_domain = (min(values) if log else min(0.0, *values), max(values)) if len(set(values)) > 1 else None
    return [
        _lines(
            page, of_run, words, run=page.label(run), missing=[] if of_run else [words.why],
            keys=True, log=log, y_domain=y_domain,
        )
        for run, of_run in zip(page.runs, there, strict=True)
    ]  # fmt: skip


def _lines(
    page: Comparison,
    curves: Sequence[Curve],
    words: Words,
    *,
    missing: Sequence[str],
    keys: bool,
    run: str = "",
    log: bool = False,
    y_domain: Domain | None = None,
) -> Figure:
    figure = Figure(words.title, words.says, None, paper=words.paper, run=run, missing=missing)
    if not curves:
        return figure
    drawn = [_drawn(page, curve, words) for curve in curves]
    point = f" A point is the {'largest' if words.peaks else 'mean'} of {page.width} steps."
    return replace(
        figure,
        says=words.says + (point if page.width > 1 else ""),
        chart=charts.lines(
            drawn, x=STEP, y=words.y, x_domain=page.domain, y_domain=y_domain, zero=True, log=log
        ),
        summary=in_words(curves),
        table=table_of(drawn, STEP),
        keys=[curve.key for curve in curves] if keys else [],
        domain=page.domain,
    )  # fmt: skip


def _drawn(page: Comparison, curve: Curve, words: Words) -> Curve:
    return Curve(curve.key, binned(curve.values, page.width, peaks=words.peaks))


def reward(page: Comparison) -> Figure:
    """The reward of each run, as measured and smoothed."""
    says = "Mean reward of all fresh responses, before the filter: how good the policy is."
    found = [Curve(page.key(index), run.curve(REWARD)) for index, run in enumerate(page.runs)]
    missing = _lacking(page, [curve.values for curve in found], f"{REWARD} is not recorded")
    figure = Figure("Reward over the steps", says, None, paper="Fig. 4", missing=missing)
    there = [Curve(curve.key, binned(curve.values, page.width)) for curve in found if len(curve.values)]
    if not there:
        return figure
    faint = [Curve(replace(curve.key, dash=""), curve.values, faint=True) for curve in there]
    bold = [Curve(replace(curve.key, name=f"{curve.key.name}, smoothed"), smoothed(curve.values)) for curve in there]
    width = smoothing_width(max(len(curve.values) for curve in there)) * page.width
    return replace(
        figure,
        says=f"{says} Faint: as measured; bold: moving average of {width} steps.",
        chart=charts.lines([*faint, *bold], x=STEP, y="mean reward", x_domain=page.domain),
        summary=in_words(found),
        table=table_of([*faint, *bold], STEP),
        keys=[curve.key for curve in there] if len(page.runs) > 1 else [],
        domain=page.domain,
        wide=True,
    )


def reward_for(page: Comparison, metric: str, spent: str) -> Figure:
    """The smoothed reward of each run over what it had spent by then, a running total."""
    found = [run.curve(REWARD, over=metric) for run in page.runs]
    figure = Figure(
        f"Reward for {spent}",
        f"The smoothed reward against the {spent}: which run gets further for the same cost.",
        None,
        missing=_lacking(page, found, f"{spent} or rewards are not recorded"),
    )
    drawn = [
        Curve(page.key(index), smoothed(chunk_means(values, MAX_POINTS)))
        for index, values in enumerate(found)
        if len(values)
    ]
    if not drawn:
        return figure
    domain = (0.0, max(float(curve.values.index[-1]) for curve in drawn) or 1.0)
    return replace(
        figure,
        chart=charts.lines(drawn, x=spent, y="mean reward, smoothed", x_domain=domain),
        summary=in_words(drawn, spent),
        table=table_of(drawn, spent),
        keys=[curve.key for curve in drawn] if len(page.runs) > 1 else [],
        domain=domain,
    )


def _lacking(page: Comparison, values: Sequence[pd.Series], why: str) -> list[str]:
    """A sentence for each run that has nothing to draw."""
    if all(found.empty for found in values):
        return [why]
    return [f"{run.name}: {why}" for run, found in zip(page.runs, values, strict=True) if found.empty]


# ── areas ──


def composition(page: Comparison) -> list[Figure]:
    """X1, X2 and X3 of each step, and the capacity of the batch."""
    words = Words(
        "Batch composition",
        "Groups that each step trained on, by where they came from, and the most that a batch holds.",
        "groups in a batch",
        "Fig. 8, 14",
    )
    metrics = {
        f"groups/{source}": Key(SOURCE_LABELS[source], SOURCE_COLOURS[source], shape="area") for source in SOURCES
    }
    drawn = _areas(page, metrics, words, {"groups/capacity": Key("batch capacity", INK, "5 3")})
    return [replace(figure, wide=len(page.runs) == 1) for figure in drawn]


def filtered(page: Comparison) -> list[Figure]:
    """Fresh groups that the filter dropped, by the reason."""
    words = Words(
        "Filtered groups",
        "Fresh groups that the filter dropped in each step, by the reason.",
        "groups filtered in a step",
        why="nothing was filtered, or the reasons are not recorded",
    )
    metrics = {
        f"filtered/{reason}": Key(STATE_LABELS[reason].removeprefix("filtered: "), colour, shape="area")
        for reason, colour in REASON_COLOURS.items()
    }
    return _areas(page, metrics, words)


def phases(page: Comparison) -> list[Figure]:
    """Seconds of a step, by what they were spent on."""
    words = Words("Time by phase", "Seconds of a step, by what they were spent on.", "seconds in a step", "Table 2")
    there = dict.fromkeys([*PHASE_LABELS, *(phase for run in page.runs for phase in data.cost(run).seconds)])
    metrics = {
        f"timing/{phase}": Key(PHASE_LABELS.get(phase, phase), phase_colour(place), shape="area")
        for place, phase in enumerate(there)
    }
    return _areas(page, metrics, words)


def _areas(page: Comparison, metrics: dict[str, Key], words: Words, over: dict[str, Key] | None = None) -> list[Figure]:
    """Metrics stacked over the steps, with lines over them: a figure for each run, all with the same axes."""
    stacks = [_curves(page, run, metrics) for run in page.runs]
    lines = [_curves(page, run, over or {}) for run in page.runs]
    tops = [pd.concat([curve.values for curve in stack], axis=1).sum(axis=1).max() for stack in stacks if stack]
    tops += [curve.values.max() for of_run in lines for curve in of_run]
    return [
        _area(page, run, stack, of_run, words, max(tops, default=1.0))
        for run, stack, of_run in zip(page.runs, stacks, lines, strict=True)
    ]


def _curves(page: Comparison, run: Run, metrics: dict[str, Key]) -> list[Curve]:
    """The curves that are not 0 everywhere."""
    curves = [Curve(key, binned(run.curve(metric), page.width)) for metric, key in metrics.items()]
    return [curve for curve in curves if curve.values.any()]


def _area(
    page: Comparison, run: Run, stack: Sequence[Curve], lines: Sequence[Curve], words: Words, top: float
) -> Figure:
    figure = Figure(words.title, words.says, None, paper=words.paper, run=page.label(run), missing=[words.why])
    if not stack:
        return figure
    return replace(
        figure,
        says=words.says + (f" A column is the mean of {page.width} steps." if page.width > 1 else ""),
        chart=charts.areas(stack, lines, width=page.width, last_step=page.last_step, y=words.y, top=top),
        summary=in_words([*stack, *lines]),
        table=table_of([*stack, *lines], STEP),
        keys=[curve.key for curve in (*stack, *lines)],
        domain=(0.5, page.last_step + 0.5),
        missing=(),
    )


# ── accuracy ──


def accuracy(page: Comparison) -> list[Figure]:
    """Prompts by accuracy over the passes, then where they went until each third of the steps."""
    return [*accuracy_bins(page), *migrations(page, thirds(page.last_step))]


def accuracy_bins(page: Comparison) -> list[Figure]:
    """Prompts by accuracy over the passes: a figure for each run, all with the same axes."""
    found = [None if why_no_bins(run) else passes(run.groups) for run in page.runs]
    top = max((int(counts.sum(axis=1).max()) for counts in found if counts is not None), default=1)
    return [_passes(page, run, counts, top) for run, counts in zip(page.runs, found, strict=True)]


def migrations(page: Comparison, steps: Sequence[int]) -> list[Figure]:
    """Where prompts went until each of the steps: for each step a figure for each run."""
    return [_migration(page, run, step) for step in steps for run in page.runs]


def _passes(page: Comparison, run: Run, counts: pd.DataFrame | None, top: int) -> Figure:
    figure = Figure(
        "Prompts by accuracy over the passes",
        "How many prompts are in each accuracy bin; those at the bottom, in red, had no right response.",
        None,
        paper="Fig. 7, 13",
        run=page.label(run),
    )
    if counts is None:
        return replace(figure, missing=[why_no_bins(run)])
    names = _bin_names(counts)
    colours = accuracy_colours(len(names) - 1)
    ends = (("At first", counts.iloc[0]), (f"After {counts.index[-1]} passes", counts.iloc[-1]))
    words = [
        f"{when}: {number(row.iloc[0])} of {number(row.sum())} in {names[0]}, {number(row.iloc[-1])} in {names[-1]}."
        for when, row in ends
    ]
    x = "passes through the data (first: as first seen)"
    return replace(
        figure,
        chart=charts.bars(counts, colours, x=x, y="prompts", top=top),
        summary=" ".join(words),
        table=_count_table(counts, "passes", names),
        keys=[Key(name, colour, shape="area") for name, colour in zip(names, colours, strict=True)],
    )


def _migration(page: Comparison, run: Run, step: int) -> Figure:
    figure = Figure(
        f"Accuracy migration until step {step:,}",
        "Prompts by the bin of their first group (row) and latest (column); right of the diagonal they improved.",
        None,
        paper="Fig. 15",
        run=page.label(run),
    )
    if why := why_no_bins(run):
        return replace(figure, missing=[why])
    counts = migration(run.groups, step)
    worse, same, better = moved(counts)
    if not worse + same + better:
        return replace(figure, missing=["no prompt has two groups by then"])
    names = _bin_names(counts)
    return replace(
        figure,
        chart=charts.matrix(counts, x="latest group", y="first group"),
        summary=f"Of {number(worse + same + better)} prompts with two groups or more, {number(better)} improved, "
        f"{number(same)} stayed and {number(worse)} got worse.",
        table=_count_table(counts.set_axis(names, axis=0), "first group", names),
    )


def _bin_names(counts: pd.DataFrame) -> list[str]:
    return [f"{k}/{counts.shape[1] - 1}" for k in range(counts.shape[1])]


def _count_table(counts: pd.DataFrame, head: str, names: Sequence[str]) -> Table:
    return Table(counts.set_axis(list(names), axis=1).rename_axis(head).reset_index())

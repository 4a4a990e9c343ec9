"""The figures of the page: what each draws of the runs, and its words."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from bapo_openrlhf.record.run_record import REWARD
from bapo_openrlhf.workbench.pages import charts, colours, curves
from bapo_openrlhf.workbench.pages.charts import STEP, Domain
from bapo_openrlhf.workbench.pages.colours import SOURCE_LABELS
from bapo_openrlhf.workbench.pages.curves import Curve, Key, binned, in_words, smoothed
from bapo_openrlhf.workbench.pages.figure import Figure
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import number
from bapo_openrlhf.workbench.report.accuracy import migration, moved, passes, why_no_bins
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.report.words import OF_EVERY_RUN, WORDS, Words, of_other

Dressed = Callable[[Sequence[Curve]], list[Curve]]

MAX_POINTS = 200  # of a curve, and rows of its table
BASELINE = Key("", colours.MUTED, "5 3")  # the legend of a baseline


@dataclass(frozen=True)
class Comparison:
    """The runs of a page with what their figures share: colours, axes, and how many steps a point stands for.

    Attributes:
        runs: The runs, or the arms of a study as pooled runs.
        study_steps: The newest step of the study that the runs are arms of. 0 without a study.
        points: The most points of a curve.
        baseline: Whether the first run is the baseline of the others, in grey.
    """

    runs: Sequence[Run]
    study_steps: int = 0
    points: int = MAX_POINTS
    baseline: bool = False

    @property
    def last_step(self) -> int:
        """The newest step of all runs, or of the study."""
        return self.study_steps or max(run.last_step for run in self.runs)

    @property
    def width(self) -> int:
        """How many steps a drawn point stands for."""
        return curves.bin_width(self.last_step, self.points)

    @property
    def domain(self) -> Domain:
        """The ends of an axis of steps. A run of one step has room around it."""
        return (1, self.last_step) if self.last_step > 1 else (0.5, 1.5)

    def key(self, index: int) -> Key:
        """The legend of a run. Its colour and its dashes are the same in all figures."""
        name, place = self.runs[index].name, index - self.baseline
        if place < 0:
            return replace(BASELINE, name=name)
        return Key(name, colours.PALETTE[place % len(colours.PALETTE)], colours.DASHES[place % len(colours.DASHES)])

    def label(self, run: Run) -> str:
        """What a figure of one run is called by: nothing if there is only one run, and no study."""
        return run.name if self.study_steps or len(self.runs) > 1 else ""

    @property
    def legend(self) -> dict[str, Any]:
        """What a figure with a line for each run changes of its legend: a single run has none."""
        return {} if len(self.runs) > 1 else {"keys": []}


# ── lines ──


def by_run(page: Comparison, metric: str, y_domain: Domain | None = None) -> Figure:
    """One metric of WORDS over the steps, with a line for each run."""
    words = WORDS[metric]
    figure = words.figure(missing=_lacking(page, [metric], words.why))
    return _lines(page, figure, words, _of_runs(page, metric), page.legend, y_domain)


def of_others(page: Comparison) -> list[Figure]:
    """The numbers that a method or a reward function reports, over the steps, with a line for each run."""
    names, result = dict.fromkeys(name for run in page.runs for name in run.metrics), []
    for metric in (name for name in names if name not in OF_EVERY_RUN):
        words = of_other(metric)
        figure = words.figure(missing=_lacking(page, [metric], words.why))
        result.append(_lines(page, figure, words, _of_runs(page, metric), page.legend, None))
    return result


def by_source(page: Comparison, metric: str) -> list[Figure]:
    """A metric of WORDS with {} for the source, over the steps: a figure for each run, a line for each source."""
    keys = {
        metric.format(source): Key(label, colours.SOURCE_COLOURS[source], dash)
        for (source, label), dash in zip(SOURCE_LABELS.items(), colours.DASHES, strict=False)
    }
    return in_each(page, keys, metric)


def in_each(page: Comparison, metrics: dict[str, Key], entry: str = "", dressed: Dressed = list) -> list[Figure]:
    """Several metrics over the steps: a figure for each run, all with the same axes.

    Args:
        entry: The entry of WORDS; that of the first metric if empty.
        dressed: Gives the curves of a run, as they are drawn, their bands and their strengths.
    """
    words = WORDS[entry or next(iter(metrics))]
    of_runs = [[Curve(key, run.curve(metric)) for metric, key in metrics.items()] for run in page.runs]
    drawn = [value for of_run in of_runs for curve in of_run for value in _drawn(page, curve, words).values]
    y_domain = (min(0.0, *drawn), max(drawn)) if len(set(drawn)) > 1 else None
    result = []
    for run, of_run in zip(page.runs, of_runs, strict=True):
        there = [curve for curve in of_run if len(curve.values)]
        figure = words.figure(page.label(run), [] if there else [words.why])
        result.append(_lines(page, figure, words, there, {}, y_domain, dressed))
    return result


def thresholds(page: Comparison) -> list[Figure]:
    """c2 and c3 with the area between them, and the average reward that moves them as a thin line."""
    metrics = {
        "threshold/c2": Key("c2", colours.PALETTE[0]),
        "threshold/c3": Key("c3", colours.PALETTE[1]),
        "threshold/average_reward": Key("average reward", colours.MUTED),
    }
    return in_each(page, metrics, dressed=_area_between)


def _area_between(drawn: Sequence[Curve]) -> list[Curve]:
    """The first curve with an area up to the second, and the others faint."""
    if len(drawn) < 2:
        return list(drawn)
    low, high, *others = drawn
    band = pd.concat([low.values, high.values], axis=1, keys=["low", "high"]).dropna()
    return [replace(low, band=band), high, *(replace(other, faint=True) for other in others)]


def _lines(
    page: Comparison,
    figure: Figure,
    words: Words,
    lines: Sequence[Curve],
    legend: dict[str, Any],
    y_domain: Domain | None,
    dressed: Dressed = list,
) -> Figure:
    """The figure with a chart of these curves over the steps."""
    if not lines:
        return figure
    width = _width(page, words)
    point = f" A point is the {'largest' if words.peaks else 'mean'} of {width} steps"
    point += ", and the pale area reaches from their least to their largest value." if words.least > 1 else "."
    says = words.says + (point if width > 1 else "")
    drawn = dressed([_drawn(page, curve, words) for curve in lines])
    chart = charts.lines(drawn, x=STEP, y=words.y, x_domain=page.domain, y_domain=y_domain, zero=True)
    return figure.with_curves(drawn, chart, STEP, page.domain, says=says, summary=in_words(lines), **legend)


def _width(page: Comparison, words: Words) -> int:
    """How many steps a point stands for: a multiple of the metric's least number, and at most all."""
    return min(words.least * math.ceil(page.width / words.least), page.last_step)


def _drawn(page: Comparison, curve: Curve, words: Words) -> Curve:
    if words.least > 1:
        return curves.spread(curve, _width(page, words))
    return Curve(curve.key, binned(curve.values, page.width, peaks=words.peaks))


def _of_runs(page: Comparison, metric: str, over: str = "step") -> list[Curve]:
    """A curve for each run that has the metric."""
    run_curves = [Curve(page.key(index), run.curve(metric, over)) for index, run in enumerate(page.runs)]
    return [curve for curve in run_curves if len(curve.values)]


def reward(page: Comparison) -> Figure:
    """The reward of each run, as measured and smoothed."""
    says = "Mean reward of all fresh responses, before the filter: how good the policy is."
    missing = _lacking(page, [REWARD], f"{REWARD} is not recorded")
    figure = Figure("Reward over the steps", says, paper="Fig. 4", missing=missing)
    rewards = _of_runs(page, REWARD)
    if not rewards:
        return figure
    there = [Curve(curve.key, binned(curve.values, page.width)) for curve in rewards]
    faint = [Curve(replace(curve.key, dash=""), curve.values, faint=True) for curve in there]
    bold = [Curve(replace(curve.key, name=f"{curve.key.name}, smoothed"), smoothed(curve.values)) for curve in there]
    width = curves.smoothing_width(max(len(curve.values) for curve in there)) * page.width
    says += f" Faint: as measured; bold: moving average of {width} steps."
    chart = charts.lines([*faint, *bold], x=STEP, y="mean reward", x_domain=page.domain)
    legend = {"keys": [curve.key for curve in there], **page.legend}
    figure = replace(figure, says=says, wide=True)
    return figure.with_curves([*faint, *bold], chart, STEP, page.domain, summary=in_words(rewards), **legend)


def reward_for(page: Comparison, metric: str, spent: str, scale: float = 1.0) -> Figure:
    """The smoothed reward of each run over what it had spent by then.

    Args:
        metric: A running total.
        spent: What the total counts.
        scale: The total is divided by it.
    """
    figure = Figure(
        f"Reward for {spent}",
        f"The smoothed reward against the {spent}: which run gets further for the same cost.",
        missing=_lacking(page, [REWARD, metric], f"{spent} or rewards are not recorded"),
    )
    drawn = [
        Curve(curve.key, smoothed(curves.chunk_means(curve.values.rename(lambda x: x / scale), MAX_POINTS)))
        for curve in _of_runs(page, REWARD, over=metric)
    ]
    if not drawn:
        return figure
    domain = (0.0, max(float(curve.values.index[-1]) for curve in drawn) or 1.0)
    chart = charts.lines(drawn, x=spent, y="mean reward, smoothed", x_domain=domain)
    return figure.with_curves(drawn, chart, spent, domain, summary=in_words(drawn, spent), **page.legend)


def _lacking(page: Comparison, metrics: Sequence[str], why: str) -> list[str]:
    """A sentence for each run that never has all these metrics in one step."""
    lacking = [run for run in page.runs if run.curve(metrics[0], metrics[-1] if metrics[1:] else "step").empty]
    return [why] if len(lacking) == len(page.runs) else [f"{run.name}: {why}" for run in lacking]


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
        f"groups/{source}": Key(label, colours.SOURCE_COLOURS[source], shape="area")
        for source, label in SOURCE_LABELS.items()
    }
    drawn = _areas(page, metrics, words, {"groups/capacity": Key("batch capacity", colours.INK, "5 3")})
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
        f"filtered/{reason}": Key(colours.STATE_LABELS[reason].removeprefix("filtered: "), colour, shape="area")
        for reason, colour in colours.REASON_COLOURS.items()
    }
    return _areas(page, metrics, words)


def _areas(page: Comparison, metrics: dict[str, Key], words: Words, over: dict[str, Key] | None = None) -> list[Figure]:
    """Metrics stacked over the steps, with lines over them: a figure for each run, all with the same axes."""
    stacks = [(run, _curves(page, run, metrics), _curves(page, run, over or {})) for run in page.runs]
    tops = [pd.concat([curve.values for curve in stack], axis=1).sum(axis=1).max() for _, stack, _ in stacks if stack]
    tops += [curve.values.max() for _, _, lines in stacks for curve in lines]
    says = words.says + (f" A column is the mean of {page.width} steps." if page.width > 1 else "")
    domain, result = (0.5, page.last_step + 0.5), []
    for run, stack, lines in stacks:
        figure = words.figure(page.label(run), [words.why])
        if stack:
            axes = {"width": page.width, "last_step": page.last_step, "y": words.y, "top": max(tops)}
            chart = charts.areas(stack, lines, **axes)
            figure = figure.with_curves([*stack, *lines], chart, STEP, domain, says=says, missing=())
        result.append(figure)
    return result


def _curves(page: Comparison, run: Run, metrics: dict[str, Key]) -> list[Curve]:
    """The curves that are not 0 everywhere."""
    of_metrics = [Curve(key, binned(run.curve(metric), page.width)) for metric, key in metrics.items()]
    return [curve for curve in of_metrics if curve.values.any()]


# ── accuracy ──


def accuracy_bins(page: Comparison) -> list[Figure]:
    """Prompts by accuracy over the passes: a figure for each run, all with the same axes."""
    bins = [None if why_no_bins(run) else passes(run.groups) for run in page.runs]
    top = max((int(counts.sum(axis=1).max()) for counts in bins if counts is not None), default=1)
    return [_passes(page, run, counts, top) for run, counts in zip(page.runs, bins, strict=True)]


def migrations(page: Comparison) -> list[Figure]:
    """Where prompts went until the last step: a figure for each run."""
    return [_migration(page, run) for run in page.runs]


def _passes(page: Comparison, run: Run, counts: pd.DataFrame | None, top: int) -> Figure:
    figure = Figure(
        "Prompts by accuracy over the passes",
        "How many prompts are in each accuracy bin; those at the bottom, in orange, had no right response.",
        paper="Fig. 7, 13",
        run=page.label(run),
    )
    if counts is None:
        return replace(figure, missing=[why_no_bins(run)])
    names = _bin_names(counts)
    shades = colours.accuracy_colours(len(names) - 1)
    ends = (("At first", counts.iloc[0]), (f"After {counts.index[-1]} passes", counts.iloc[-1]))
    words = [
        f"{when}: {number(row.iloc[0])} of {number(row.sum())} in {names[0]}, {number(row.iloc[-1])} in {names[-1]}."
        for when, row in ends
    ]
    x = "passes through the data (first: as first seen)"
    return replace(
        figure,
        chart=charts.bars(counts, shades, x=x, y="prompts", top=top),
        summary=" ".join(words),
        table=_count_table(counts, "passes", names),
        keys=[Key(name, colour, shape="area") for name, colour in zip(names, shades, strict=True)],
    )


def _migration(page: Comparison, run: Run) -> Figure:
    figure = Figure(
        f"Accuracy migration until step {page.last_step:,}",
        "Prompts by the bin of their first group (row) and latest (column); right of the diagonal they improved.",
        paper="Fig. 15",
        run=page.label(run),
    )
    if why := why_no_bins(run):
        return replace(figure, missing=[why])
    counts = migration(run.groups)
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

"""The figures of the page: what each draws of the runs, and its words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from bapo_openrlhf.adapt.metric import ALL
from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import REWARD
from bapo_openrlhf.record.shapes import scores
from bapo_openrlhf.workbench.pages import charts, colours
from bapo_openrlhf.workbench.pages.charts import STEP, Curve, Domain, Key, bin_width, binned, curves_in_words, smoothed
from bapo_openrlhf.workbench.pages.colours import SOURCE_LABELS
from bapo_openrlhf.workbench.pages.figure import Figure
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import many, number, smoothing_width
from bapo_openrlhf.workbench.report.accuracy import migration, movement, passes, why_no_bins
from bapo_openrlhf.workbench.report.runs import Run

MAX_POINTS = 200  # of a curve, and rows of its table
SYNCS = 12  # steps in which the syncs go round a whole number of times if v is 2, 3, 4 or 6
BASELINE = Key("", colours.MUTED, "5 3")  # the legend of a baseline
PEAKS = {"actor_grad_norm"}  # if a point stands for several steps, it is their largest value and not their mean

_CATALOGUE = {metric.name: metric for metric in metrics.all_metrics()}  # of record/metrics.yaml
_OF_METHODS = {metric.name for metric in metrics.DECLARED["other methods"]}
_OF_RUNS = {name for algorithm in ALL for name in metrics.names(algorithm, optional=True)}
OF_EVERY_RUN = {"step", "seconds"} | _OF_RUNS - _OF_METHODS  # columns of `Run.metrics`


@dataclass(frozen=True)
class Comparison:
    """The runs of a page, or the arms of a study as pooled runs, with what their figures share."""

    runs: Sequence[Run]
    study_steps: int = 0  # the newest step of the study that the runs are arms of; 0 without a study
    points: int = MAX_POINTS  # the most of a curve
    baseline: bool = False  # the first run is the baseline of the others, in grey

    @property
    def last_step(self) -> int:
        """The newest step of all runs, or of the study."""
        return self.study_steps or max(run.last_step for run in self.runs)

    @property
    def width(self) -> int:
        """How many steps a drawn point stands for."""
        return bin_width(self.last_step, self.points)

    @property
    def domain(self) -> Domain:
        """The ends of an axis of steps. A run of one step has room around it."""
        return (1, self.last_step) if self.last_step > 1 else (0.5, 1.5)

    def key(self, index: int) -> Key:
        """The legend of a run. Its colour and its dashes are the same in all figures."""
        name, place = self.runs[index].name, index - self.baseline
        return replace(BASELINE, name=name) if place < 0 else _key(name, place)

    def label(self, run: Run) -> str:
        """What a figure of one run is called by: nothing if there is only one run, and no study."""
        return run.name if self.study_steps or len(self.runs) > 1 else ""

    @property
    def legend(self) -> dict[str, Any]:
        """What a figure with a line for each run changes of its legend: a single run has none."""
        return {} if len(self.runs) > 1 else {"keys": []}


def _key(name: str, place: int) -> Key:
    return Key(name, colours.PALETTE[place % len(colours.PALETTE)], colours.DASHES[place % len(colours.DASHES)])


# ── lines ──


def figure_of(metric: str) -> Figure:
    """A figure, without a chart, of a metric with {} for a source. Flags lose their marks: the page makes its own."""
    entry = _CATALOGUE.get(metric.replace("{}", "SOURCE"))
    if entry is None:
        return Figure(metric, "The method or the reward function reports this number.")
    paper = "" if "arXiv" in entry.paper else entry.paper  # that of another paper
    return Figure(entry.title, entry.sentence.replace("`", ""), paper=paper)


def unit_of(metric: str) -> str:
    entry = _CATALOGUE.get(metric.replace("{}", "SOURCE"))
    if entry is None:
        return ""
    return {"0 to 1": "share, 0 to 1", "": entry.title.lower()}.get(entry.unit, entry.unit)


def by_run(page: Comparison, metric: str, y_domain: Domain | None = None) -> Figure:
    """One metric over the steps, with a line for each run."""
    return _lines(page, figure_of(metric), metric, _of_runs(page, metric), y_domain, **page.legend)


def of_others(page: Comparison) -> list[Figure]:
    """The numbers that a method or a reward function reports, over the steps, with a line for each run."""
    names = dict.fromkeys(name for run in page.runs for name in run.metrics)
    return [by_run(page, metric) for metric in names if metric not in OF_EVERY_RUN]


def by_source(page: Comparison, metric: str) -> list[Figure]:
    """A metric with {} for the source, over the steps: a figure for each run, a line for each source."""
    keys = {
        metric.format(source): Key(label, colours.SOURCE_COLOURS[source], dash)
        for (source, label), dash in zip(SOURCE_LABELS.items(), colours.DASHES, strict=False)
    }
    return in_each(page, figure_of(metric), metric, keys)


def in_each(page: Comparison, figure: Figure, metric: str, keys: Mapping[str, Key]) -> list[Figure]:
    """Several metrics over the steps: a figure for each run, all with the same axes. `metric` names their unit."""
    of_runs = [
        [Curve(key, values) for name, key in keys.items() if len(values := run.curve(name))] for run in page.runs
    ]
    heights = [value for lines in of_runs for line in lines for value in binned(line.values, page.width)]
    y_domain = (min(0.0, *heights), max(heights)) if len(set(heights)) > 1 else None
    return [
        _lines(page, replace(figure, run=page.label(run)), metric, lines, y_domain)
        for run, lines in zip(page.runs, of_runs, strict=True)
    ]


def thresholds(page: Comparison) -> list[Figure]:
    sentence = "Groups with a mean from c2 to c3 are replayed. Both follow the average reward (Eq. 8)."
    figure = Figure("Thresholds of the replay", sentence)
    keys = {
        "threshold/c2": Key("c2", colours.PALETTE[0]),
        "threshold/c3": Key("c3", colours.PALETTE[1]),
        "threshold/average_reward": Key("average reward", colours.MUTED, "2 2"),
    }
    return in_each(page, figure, "threshold/c2", keys)


def ages(page: Comparison) -> list[Figure]:
    figure = Figure("Age of the replayed groups", "How many trainer steps ago the groups of X3 were generated.")
    keys = {
        "staleness/replayed_steps_mean": Key("mean", colours.SOURCE_COLOURS["replayed"]),
        "staleness/replayed_steps_max": Key("oldest", colours.PALETTE[1], "7 3"),
    }
    return in_each(page, figure, "staleness/replayed_steps_mean", keys)


def _lines(
    page: Comparison, figure: Figure, metric: str, lines: Sequence[Curve], y_domain: Domain | None, **more: Any
) -> Figure:
    if not lines:
        return figure
    # A point for each step of an age that goes up and down at every sync would fill the chart.
    least = min(SYNCS, page.last_step) if metric == "staleness/rollout_policy" else 1
    peaks, width = metric in PEAKS, max(page.width, least)
    point = f" A point is the {'largest' if peaks else 'mean'} of {width} steps." if width > 1 else ""
    points = [replace(curve, values=binned(curve.values, width, peaks=peaks)) for curve in lines]
    chart = charts.lines(points, x=STEP, y=unit_of(metric), x_domain=page.domain, y_domain=y_domain, zero=True)
    words = {"sentence": figure.sentence + point, "summary": curves_in_words(lines)}
    return figure.with_curves(points, chart, STEP, **words, **more)


def _of_runs(page: Comparison, metric: str) -> list[Curve]:
    lines = [Curve(page.key(index), run.curve(metric)) for index, run in enumerate(page.runs)]
    return [line for line in lines if len(line.values)]


# ── outcome ──


def held_out(page: Comparison) -> list[Figure]:
    """The evaluations: of one run a line for each data set; of several a figure for each set, a line for each run."""
    figure = Figure("Held-out evaluation", "Mean reward of the answers to prompts that are not trained on.", wide=True)
    tables = [pd.DataFrame({row["step"]: scores(row) for row in run.evaluations}, dtype=float).T for run in page.runs]
    names = list(dict.fromkeys(name for table in tables for name in table))
    if len(tables) == 1 and names:
        lines = [Curve(_key(name, place), tables[0][name].dropna()) for place, name in enumerate(names)]
        return [_held_out(page, figure, lines)]
    return [
        _held_out(
            page,
            replace(figure, title=f"{figure.title}: {name}", wide=len(names) == 1),
            [Curve(page.key(k), table[name].dropna()) for k, table in enumerate(tables) if name in table],
        )
        for name in names
    ]


def _held_out(page: Comparison, figure: Figure, lines: Sequence[Curve]) -> Figure:
    domain = (min(page.domain[0], *(curve.values.index[0] for curve in lines)), page.domain[1])
    chart = charts.lines(lines, x=STEP, y="mean reward of the answers", x_domain=domain)
    return figure.with_curves(lines, chart, STEP)


def reward(page: Comparison) -> Figure:
    sentence = "Mean reward of all fresh responses, before the filter: how good the policy is."
    figure = Figure("Reward over the steps", sentence, paper="Fig. 4", wide=True)
    rewards = _of_runs(page, REWARD)
    if not rewards:
        return figure
    points = [Curve(curve.key, binned(curve.values, page.width)) for curve in rewards]
    faint = [Curve(replace(curve.key, dash=""), curve.values, faint=True) for curve in points]
    bold = [Curve(replace(curve.key, name=f"{curve.key.name}, smoothed"), smoothed(curve.values)) for curve in points]
    width = smoothing_width(max(len(curve.values) for curve in points)) * page.width
    sentence += f" Faint: as measured; bold: moving average of {many(width, 'step')}."
    chart = charts.lines([*faint, *bold], x=STEP, y="mean reward", x_domain=page.domain)
    words = {"sentence": sentence, "summary": curves_in_words(rewards)}
    legend = {"keys": [curve.key for curve in points], **page.legend}
    return figure.with_curves([*faint, *bold], chart, STEP, **words, **legend)


def reward_for(page: Comparison, metric: str, cost: str, scale: float = 1.0) -> Figure:
    """The smoothed reward of each run over a running total, which counts `cost` and is divided by `scale`."""
    sentence = f"The smoothed reward against the {cost}: which run gets further for the same cost."
    figure = Figure(f"Reward for {cost}", sentence)
    curves = {index: _reward_by(run, metric, scale, page.width) for index, run in enumerate(page.runs)}
    lines = [Curve(page.key(index), values) for index, values in curves.items() if len(values)]
    if not lines:
        return figure
    domain = (0.0, max(float(line.values.index[-1]) for line in lines) or 1.0)
    chart = charts.lines(lines, x=cost, y="mean reward, smoothed", x_domain=domain)
    return figure.with_curves(lines, chart, cost, summary=curves_in_words(lines, cost), **page.legend)


def _reward_by(run: Run, metric: str, scale: float, width: int) -> pd.Series:
    """The smoothed reward by a running total, in bins of `width` steps. Steps that lack one of them are left out."""
    pairs = run.metrics.reindex(columns=[REWARD, metric]).dropna()
    return smoothed(binned(pairs[REWARD], width).set_axis(binned(pairs[metric], width) / scale))


# ── areas ──


def composition(page: Comparison) -> list[Figure]:
    sentence = "Groups that each step trained on, by where they came from, and the most that a batch holds."
    figure = Figure("Batch composition", sentence, paper="Fig. 8, 14", wide=len(page.runs) == 1)
    keys = {
        f"groups/{source}": Key(label, colours.SOURCE_COLOURS[source], shape="area")
        for source, label in SOURCE_LABELS.items()
    }
    over = {"groups/capacity": Key("batch capacity", colours.INK, "5 3")}
    return _areas(page, figure, "groups in a batch", keys, over)


def filtered(page: Comparison) -> list[Figure]:
    figure = Figure("Filtered groups", "Fresh groups that the filter dropped in each step, by the reason.")
    keys = {
        f"filtered/{reason}": Key(colours.STATE_LABELS[reason].removeprefix("filtered: "), colour, shape="area")
        for reason, colour in colours.REASON_COLOURS.items()
    }
    return _areas(page, figure, "groups filtered in a step", keys, {})


def _areas(page: Comparison, figure: Figure, y: str, keys: Mapping[str, Key], over: Mapping[str, Key]) -> list[Figure]:
    stacks = [(run, _not_0(page, run, keys), _not_0(page, run, over)) for run in page.runs]
    tops = [pd.concat([curve.values for curve in stack], axis=1).sum(axis=1).max() for _, stack, _ in stacks if stack]
    tops += [curve.values.max() for _, _, lines in stacks for curve in lines]
    sentence = figure.sentence + (f" A column is the mean of {page.width} steps." if page.width > 1 else "")
    axes = {"width": page.width, "last_step": page.last_step, "y": y, "top": max(tops, default=1.0)}
    return [
        replace(figure, run=page.label(run)).with_curves(
            [*stack, *lines], charts.areas(stack, lines, **axes), STEP, sentence=sentence
        )
        for run, stack, lines in stacks
        if stack
    ]


def _not_0(page: Comparison, run: Run, keys: Mapping[str, Key]) -> list[Curve]:
    layers = [Curve(key, binned(run.curve(metric), page.width)) for metric, key in keys.items()]
    return [layer for layer in layers if layer.values.any()]


# ── accuracy ──


def accuracy_bins(page: Comparison) -> list[Figure]:
    """Prompts by accuracy over the passes: a figure for each run, all with the same axes."""
    bins = {page.label(run): passes(run.groups) for run in page.runs if not why_no_bins(run)}
    top = max((int(counts.sum(axis=1).max()) for counts in bins.values()), default=1)
    return [_passes(label, counts, top) for label, counts in bins.items()]


def _passes(label: str, counts: pd.DataFrame, top: int) -> Figure:
    names = _bin_names(counts)
    shades = colours.accuracy_colours(len(names) - 1)
    words = [
        f"{when}: {number(row.iloc[0])} of {number(row.sum())} in {names[0]}, {number(row.iloc[-1])} in {names[-1]}."
        for when, row in (("At first", counts.iloc[0]), (f"After {counts.index[-1]} passes", counts.iloc[-1]))
    ]
    return Figure(
        "Prompts by accuracy over the passes",
        "How many prompts are in each accuracy bin; those at the bottom, in orange, had no right response.",
        paper="Fig. 7, 13",
        run=label,
        chart=charts.bars(counts, shades, x="passes through the data (first: as first seen)", y="prompts", top=top),
        summary=" ".join(words),
        table=_count_table(counts, "passes", names),
        keys=[Key(name, colour, shape="area") for name, colour in zip(names, shades, strict=True)],
    )


def migrations(page: Comparison) -> list[Figure]:
    """Where prompts went until the last step: a figure for each run."""
    title = f"Accuracy migration until step {page.last_step:,}"
    counts = {page.label(run): migration(run.groups) for run in page.runs if not why_no_bins(run)}
    return [_migration(title, label, of_run) for label, of_run in counts.items() if of_run.to_numpy().any()]


def _migration(title: str, label: str, counts: pd.DataFrame) -> Figure:
    worse, same, better = movement(counts)
    names = _bin_names(counts)
    return Figure(
        title,
        "Prompts by the bin of their first group (row) and latest (column); right of the diagonal they improved.",
        paper="Fig. 15",
        run=label,
        chart=charts.matrix(counts, x="latest group", y="first group"),
        summary=f"Of {number(worse + same + better)} prompts with two groups or more, {number(better)} improved, "
        f"{number(same)} stayed and {number(worse)} got worse.",
        table=_count_table(counts.set_axis(names, axis=0), "first group", names),
    )


def _bin_names(counts: pd.DataFrame) -> list[str]:
    return [f"{k}/{counts.shape[1] - 1}" for k in range(counts.shape[1])]


def _count_table(counts: pd.DataFrame, head: str, names: Sequence[str]) -> Table:
    return Table(counts.set_axis(list(names), axis=1).rename_axis(head).reset_index())

"""The figures of the page: what each draws of the runs, and its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapo_openrlhf.record.run_record import GROUPS, REWARD, SOURCES
from bapo_openrlhf.workbench.plot import LABELS
from bapo_openrlhf.workbench.report import charts, data
from bapo_openrlhf.workbench.report.charts import Chart, Curve, Key, Table, number
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.report.words import WORDS, Words

# Phases as OpenRLHF and the layer name them, in the order of a step; others are added as they are.
PHASES = {
    "generation": "generation",
    "reevaluation": "re-evaluation on its own",
    "make_experience": "log-probs, values, rewards",
    "adapt": "batch adaptation",
    "ppo_train": "training",
    "broadcast": "sync of the rollout engines",
}
REASON_COLOURS = {"none_right": charts.NONE_RIGHT, "all_right": charts.ALL_RIGHT, "by_draw": charts.PALETTE[3]}


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
        """Steps that a drawn point stands for."""
        return data.bin_width(self.last_step, charts.MAX_POINTS)

    @property
    def domain(self) -> tuple[float, float]:
        """Of an axis of steps; a run of one step has room around it."""
        return (1, self.last_step) if self.last_step > 1 else (0.5, 1.5)

    def key(self, index: int) -> Key:
        """The legend of a run: its colour and its dashes are the same in all figures."""
        colour, dash = (values[index % len(values)] for values in (charts.PALETTE, charts.DASHES))
        return Key(self.runs[index].name, colour, dash)

    def label(self, run: Run) -> str:
        """What a figure of one run is called by: nothing where there is one run."""
        return "" if len(self.runs) == 1 else run.name


# ── lines ──


def by_run(page: Comparison, metric: str) -> Chart:
    """One metric of WORDS over the steps, a line a run."""
    words = WORDS[metric]
    curves = [Curve(page.key(index), data.points(run.rows, metric)) for index, run in enumerate(page.runs)]
    there = [curve for curve in curves if curve.points]
    missing = _lacking(page, [bool(curve.points) for curve in curves], words.why)
    return _lines(page, there, words, missing=missing, keys=len(page.runs) > 1)


def by_source(page: Comparison, metric: str) -> list[Chart]:
    """A metric of WORDS with {} for the source, over the steps: a figure a run, a line a source."""
    keys = {
        metric.format(source): Key(LABELS[source], charts.SOURCE_COLOURS[source], dash)
        for source, dash in zip(SOURCES, charts.DASHES, strict=False)
    }
    return in_each(page, keys, metric)


def in_each(page: Comparison, metrics: dict[str, Key], about: str = "", *, log: bool = False) -> list[Chart]:
    """Several metrics over the steps: a figure a run, all with the same axes.

    Args:
        about: the entry of WORDS; the first metric's if empty.
    """
    words = WORDS[about or next(iter(metrics))]
    curves = [[Curve(key, data.points(run.rows, metric)) for metric, key in metrics.items()] for run in page.runs]
    there = [[curve for curve in of_run if curve.points] for of_run in curves]
    values = [value for of_run in there for curve in of_run for _, value in _drawn(page, curve, words).points]
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
    y_domain: tuple[float, float] | None = None,
) -> Chart:
    if not curves:
        return Chart(words.title, words.says, None, paper=words.paper, run=run, missing=missing)
    drawn = [_drawn(page, curve, words) for curve in curves]
    spec = charts.lines(drawn, x=charts.STEP, y=words.y, x_domain=page.domain, y_domain=y_domain, zero=True, log=log)
    return Chart(
        words.title,
        words.says
        + (f" A point is the {'largest' if words.peaks else 'mean'} of {page.width} steps." if page.width > 1 else ""),
        spec,
        summary=charts.in_words(curves),
        table=_table(drawn, charts.STEP),
        paper=words.paper,
        run=run,
        keys=[curve.key for curve in curves] if keys else [],
        missing=missing,
        domain=page.domain,
    )


def _drawn(page: Comparison, curve: Curve, words: Words) -> Curve:
    return Curve(curve.key, data.binned(curve.points, page.width, peaks=words.peaks))


def reward(page: Comparison) -> Chart:
    """The reward of each run, as measured and smoothed."""
    found = [(page.key(index), data.points(run.rows, REWARD)) for index, run in enumerate(page.runs)]
    there = [(key, data.binned(curve, page.width)) for key, curve in found if curve]
    says = "Mean reward of all fresh responses, before the filter: how good the policy is."
    missing = _lacking(page, [bool(curve) for _, curve in found], f"{REWARD} is not recorded")
    if not there:
        return Chart("Reward over the steps", says, None, paper="Fig. 4", missing=missing)
    faint = [Curve(Key(key.name, key.colour), curve, faint=True) for key, curve in there]
    bold = [Curve(Key(f"{key.name}, smoothed", key.colour, key.dash), data.smoothed(curve)) for key, curve in there]
    width = data.smoothing_width(max(len(curve) for _, curve in there)) * page.width
    return Chart(
        "Reward over the steps",
        f"{says} Faint: as measured; bold: moving average of {width} steps.",
        charts.lines([*faint, *bold], x=charts.STEP, y="mean reward", x_domain=page.domain),
        summary=charts.in_words([Curve(key, curve) for key, curve in found]),
        table=_table([*faint, *bold], charts.STEP),
        paper="Fig. 4",
        keys=[key for key, _ in there] if len(page.runs) > 1 else [],
        missing=missing,
        domain=page.domain,
        wide=True,
    )


def reward_for(page: Comparison, metric: str, spent: str) -> Chart:
    """The smoothed reward of each run over what it had spent by then (`data.spending`)."""
    title = f"Reward for {spent}"
    says = f"The smoothed reward against the {spent}: which run gets further for the same cost."
    found = [data.against(data.spending(run.rows), metric, REWARD) for run in page.runs]
    missing = _lacking(page, [bool(curve) for curve in found], f"{spent} or rewards are not recorded")
    drawn = [
        Curve(page.key(index), data.smoothed(data.chunk_means(curve, charts.MAX_POINTS)))
        for index, curve in enumerate(found)
        if curve
    ]
    if not drawn:
        return Chart(title, says, None, missing=missing)
    domain = (0.0, max(curve.points[-1][0] for curve in drawn) or 1.0)
    return Chart(
        title,
        says,
        charts.lines(drawn, x=spent, y="mean reward, smoothed", x_domain=domain),
        summary=charts.in_words(drawn, spent),
        table=_table(drawn, spent),
        keys=[curve.key for curve in drawn] if len(page.runs) > 1 else [],
        missing=missing,
        domain=domain,
    )


def _lacking(page: Comparison, there: Sequence[bool], why: str) -> list[str]:
    """A sentence for each run that has nothing to draw."""
    if not any(there):
        return [why]
    return [f"{run.name}: {why}" for run, has in zip(page.runs, there, strict=True) if not has]


def _table(curves: Sequence[Curve], x: str) -> Table:
    """What is drawn: a row an x, a column a curve."""
    values = [dict(curve.points) for curve in curves]
    places = sorted({place for found in values for place in found})
    rows = [[place, *(found.get(place) for found in values)] for place in places]
    return Table([x, *(curve.key.name for curve in curves)], rows)


# ── areas ──


def composition(page: Comparison) -> list[Chart]:
    """X1, X2 and X3 of each step, and the room there was."""
    words = Words(
        "Batch composition",
        "Groups that each step trained on, by where they came from, and the most that a batch holds.",
        "groups in a batch",
        "Fig. 8, 14",
    )
    metrics = {
        f"groups/{source}": Key(LABELS[source], charts.SOURCE_COLOURS[source], shape="area") for source in SOURCES
    }
    drawn = _areas(page, metrics, words, {"groups/capacity": Key("batch capacity", charts.INK, "5 3")})
    return [replace(chart, wide=len(page.runs) == 1) for chart in drawn]


def filtered(page: Comparison) -> list[Chart]:
    """Fresh groups that the filter dropped, by the reason."""
    words = Words(
        "Filtered groups",
        "Fresh groups that the filter dropped in each step, by the reason.",
        "groups filtered in a step",
        why="nothing was filtered, or the reasons are not recorded",
    )
    names = {reason: data.STATES[reason].removeprefix("filtered: ") for reason in data.REASONS}
    metrics = {
        f"filtered/{reason}": Key(names[reason], colour, shape="area") for reason, colour in REASON_COLOURS.items()
    }
    return _areas(page, metrics, words)


def phases(page: Comparison) -> list[Chart]:
    """Seconds of a step, by what they were spent on."""
    words = Words("Time by phase", "Seconds of a step, by what they were spent on.", "seconds in a step", "Table 2")
    there = dict.fromkeys([*PHASES, *(phase for run in page.runs for phase in data.cost(run).seconds)])
    colours = [charts.PALETTE[place] for place in (0, 1, 2, 6, 4, 5, 3)]
    metrics = {
        f"timing/{phase}": Key(PHASES.get(phase, phase), colours[place % len(colours)], shape="area")
        for place, phase in enumerate(there)
    }
    return _areas(page, metrics, words)


def _areas(page: Comparison, metrics: dict[str, Key], words: Words, over: dict[str, Key] | None = None) -> list[Chart]:
    """Metrics stacked over the steps, with lines over them: a figure a run, all with the same axes."""
    stacks = [_curves(page, run, metrics) for run in page.runs]
    lines = [_curves(page, run, over or {}) for run in page.runs]
    tops = [height for curves in stacks for height in data.stacked_heights([curve.points for curve in curves])]
    tops += [value for curves in lines for curve in curves for _, value in curve.points]
    return [
        _area_chart(page, run, [curve for curve in stack if any(y for _, y in curve.points)], line, words, max(tops))
        if any(y for curve in stack for _, y in curve.points)
        else Chart(words.title, words.says, None, paper=words.paper, run=page.label(run),
                   missing=[words.why])
        for run, stack, line in zip(page.runs, stacks, lines, strict=True)
    ]  # fmt: skip


def _curves(page: Comparison, run: Run, metrics: dict[str, Key]) -> list[Curve]:
    return [Curve(key, data.binned(data.points(run.rows, metric), page.width)) for metric, key in metrics.items()]


def _area_chart(
    page: Comparison, run: Run, stack: Sequence[Curve], lines: Sequence[Curve], words: Words, top: float
) -> Chart:
    return Chart(
        words.title,
        words.says + (f" A column is the mean of {page.width} steps." if page.width > 1 else ""),
        charts.areas(stack, lines, width=page.width, last_step=page.last_step, y=words.y, top=top),
        summary=charts.in_words([*stack, *lines]),
        table=_table([*stack, *lines], charts.STEP),
        paper=words.paper,
        run=page.label(run),
        keys=[curve.key for curve in (*stack, *lines)],
        domain=(0.5, page.last_step + 0.5),
    )


# ── accuracy ──


def accuracy(page: Comparison) -> list[Chart]:
    """For each run: prompts by accuracy over the passes, then where they went, until each third of the steps."""
    return [*accuracy_bins(page), *migrations(page, data.thirds(page.last_step))]


def accuracy_bins(page: Comparison) -> list[Chart]:
    """Prompts by accuracy over the passes: a figure a run, all with the same axes."""
    reasons = [why_no_bins(run) for run in page.runs]
    found = [None if why else data.passes(run.groups) for run, why in zip(page.runs, reasons, strict=True)]
    top = max((sum(counts) for one in found if one for counts in one.counts), default=1)
    return [_passes(page, *parts, top) for parts in zip(page.runs, found, reasons, strict=True)]


def migrations(page: Comparison, steps: Sequence[int]) -> list[Chart]:
    """Where prompts went until each of the steps: for each step a figure a run."""
    of_runs = [_migrations(page, run, steps, why_no_bins(run)) for run in page.runs]
    return [chart for of_step in zip(*of_runs, strict=True) for chart in of_step]


def why_no_bins(run: Run) -> str:
    """Why a run's prompts have no accuracy bins; empty where they have."""
    if not run.groups:
        return f"there is no {GROUPS}: the run is of an older version"
    if all(group["mean"] is None for group in run.groups):
        return "no group of the run has a mean reward"
    if not data.rewards_fit_bins(run.groups):
        return "mean rewards are not between 0 and 1, and the bins k/G are for these"
    return ""


def _passes(page: Comparison, run: Run, found: data.Passes | None, why: str, top: int) -> Chart:
    title = "Prompts by accuracy over the passes"
    says = "How many prompts are in each accuracy bin; those at the bottom, in red, had no right response."
    if found is None:
        return Chart(title, says, None, paper="Fig. 7, 13", run=page.label(run), missing=[why])
    names = [f"{k}/{found.size}" for k in range(found.size + 1)]
    colours = charts.accuracy_colours(found.size)
    ends = (("At first", found.counts[0]), (f"After {found.names[-1]} passes", found.counts[-1]))
    words = [
        f"{when}: {number(counts[0])} of {number(sum(counts))} in {names[0]}, {number(counts[-1])} in {names[-1]}."
        for when, counts in ends
    ]
    rows = [[name, *counts] for name, counts in zip(found.names, found.counts, strict=True)]
    return Chart(
        title,
        says,
        charts.bars(
            found.names, found.counts, colours, x="passes through the data (first: as first seen)", y="prompts", top=top
        ),
        summary=" ".join(words),
        table=Table(["passes", *names], rows),
        paper="Fig. 7, 13",
        run=page.label(run),
        keys=[Key(name, colour, shape="area") for name, colour in zip(names, colours, strict=True)],
    )


def _migrations(page: Comparison, run: Run, steps: Sequence[int], why: str) -> list[Chart]:
    """A step without two groups of any prompt until then has no drawing."""
    if why:
        return [_migration(page, run, step, None, why) for step in steps]
    return [_migration(page, run, found.step, found, "") for found in data.migrations(run.groups, steps)]


def _migration(page: Comparison, run: Run, step: int, found: data.Migration | None, why: str) -> Chart:
    title = f"Accuracy migration until step {step:,}"
    says = "Prompts by the bin of their first group (row) and latest (column); right of the diagonal they improved."
    if found is None or not sum(found.moved):
        why = why or "no prompt has two groups by then"
        return Chart(title, says, None, paper="Fig. 15", run=page.label(run), missing=[why])
    names = [f"{k}/{len(found.counts) - 1}" for k in range(len(found.counts))]
    worse, same, better = found.moved
    return Chart(
        title,
        says,
        charts.matrix(found.counts, x="latest group", y="first group"),
        summary=f"Of {number(sum(found.moved))} prompts with two groups or more, {number(better)} improved, "
        f"{number(same)} stayed and {number(worse)} got worse.",
        table=Table(["first group", *names], [[name, *line] for name, line in zip(names, found.counts, strict=True)]),
        paper="Fig. 15",
        run=page.label(run),
    )

"""The figures of a study's page.

Many arms in one chart cannot be told apart. So curves with a spread are small multiples, an arm each, with the baseline
of its path in grey behind it; where medians or means suffice, a chart has at most FEW arms beside the baseline. Charts
of one kind have the same axes. What `report` draws of a run is drawn here of an arm's pooled seeds (`data.pool`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bapo_openrlhf.record.run_record import REWARD
from bapo_openrlhf.workbench.report import charts
from bapo_openrlhf.workbench.report import data as run_data
from bapo_openrlhf.workbench.report.charts import Band, Chart, Curve, IntervalRow, Key, Table
from bapo_openrlhf.workbench.report.data import Point
from bapo_openrlhf.workbench.report.figures import PHASES, Comparison, by_run
from bapo_openrlhf.workbench.report.page import clean
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.study import statistics
from bapo_openrlhf.workbench.study.data import PATHS, Results, Spread, StudyRun, band, over
from bapo_openrlhf.workbench.study.definition import Arm
from bapo_openrlhf.workbench.study.statistics import Estimate

MAX_POINTS = 48  # of a curve: there are many
FEW = 5  # arms in a chart, beside the baseline
SMALL = 185  # pixels high is a chart that many are of
LINE = 29  # and a line of a chart with a line an arm
GREY = Key("", charts.MUTED, "5 3")  # of a baseline


@dataclass(frozen=True)
class Arms(Comparison):
    """Arms as pooled runs; steps are counted as in the whole study.

    Attributes:
        steps: the newest step of the study.
        baseline: whether the first run is the others' baseline, in grey.
    """

    steps: int = 1
    baseline: bool = False

    @property
    def last_step(self) -> int:
        """The newest step of the study."""
        return self.steps

    @property
    def width(self) -> int:
        """Steps that a drawn point stands for."""
        return run_data.bin_width(self.last_step, MAX_POINTS)

    def key(self, index: int) -> Key:
        """The legend of an arm."""
        if not self.baseline:
            return super().key(index)
        if index == 0:
            return replace(GREY, name=self.runs[0].name)
        return replace(super().key(index - 1), name=self.runs[index].name)

    def label(self, run: Run) -> str:
        """Each figure of an arm says of which."""
        return run.name


def all_arms(results: Results) -> Arms:
    """Every arm that has a run, path by path."""
    return Arms([results.pooled[arm.name] for path in results.paths for arm in results.of_path(path)], _steps(results))


def few_arms(results: Results) -> list[tuple[str, list[Arm]]]:
    """At most FEW arms of a path with its baseline before them, and what to call them."""
    found = []
    for path in results.paths:
        baseline, *others = results.of_path(path)
        count = max(1, -(-len(others) // FEW))
        parts = [others[place * len(others) // count : (place + 1) * len(others) // count] for place in range(count)]
        for place, part in enumerate(parts, start=1):
            name = PATHS.get(path, path) + (f", part {place} of {len(parts)}" if len(parts) > 1 else "")
            found.append((name, [baseline, *part]))
    return found


def _steps(results: Results) -> int:
    return max(found.run.last_step for found in results.runs)


# ── medians and quartiles over the seeds ──


@dataclass(frozen=True)
class Kind:
    """What `against_baseline` draws.

    Attributes:
        curve: of a run.
        scale: what values are multiplied with.
        spent: the x axis is this running total instead of the step.
    """

    title: str
    says: str
    y: str
    curve: Callable[[StudyRun], Sequence[Point]]
    why: str
    scale: float = 1.0
    spent: str = ""


def accuracy_kind(results: Results, spent: str = "") -> Kind:
    """Held-out accuracy, the mean over the benchmarks."""
    return Kind(
        "Held-out accuracy for responses generated" if spent else "Held-out accuracy over the steps",
        "Mean pass@1 over the benchmarks.",
        "held-out accuracy, %",
        results.accuracy,
        "no evaluation was recorded",
        100.0,
        spent,
    )


def reward_kind(spent: str = "") -> Kind:
    """Training reward, smoothed within each run."""
    return Kind(
        "Reward for responses generated" if spent else "Reward over the steps",
        "Mean reward of the fresh responses before the filter, smoothed.",
        "mean reward, smoothed",
        lambda found: run_data.smoothed(run_data.points(found.run.rows, REWARD)),
        f"{REWARD} is not recorded",
        1.0,
        spent,
    )


def against_baseline(results: Results, kind: Kind) -> list[Chart]:
    """An arm a chart, each with the baseline of its path in grey: median and interquartile band over the seeds."""
    most = MAX_POINTS // 2 if kind.spent else MAX_POINTS  # each curve has its own places there, and rows of the table
    width = run_data.bin_width(_steps(results), most)
    bands = {arm.name: _band(kind, results.by_arm[arm.name], width) for arm in results.arms}
    places = [spread.x for spreads in bands.values() for spread in spreads]
    if not places:
        return [Chart(kind.title, kind.says, None, missing=[kind.why])]
    domain = (0.0, max(places) or 1.0) if kind.spent else (min(1.0, *places), float(max(_steps(results), *places, 2)))
    ends = [value for spreads in bands.values() for spread in spreads for value in (spread.low, spread.high)]
    y_domain = (min(ends), max(ends)) if min(ends) < max(ends) else None
    return [
        _multiple(results, kind, arm, baseline, bands, domain, y_domain)
        for path in results.paths
        for baseline, arm in _with_baseline(results.of_path(path))
    ]


def _with_baseline(arms: Sequence[Arm]) -> list[tuple[Arm | None, Arm]]:
    """Each arm with its baseline; a baseline that is alone stands for itself."""
    baseline, *others = arms
    return [(baseline, arm) for arm in others] or [(None, baseline)]


def _band(kind: Kind, runs: Sequence[StudyRun], width: int) -> list[Spread]:
    """Over the steps; or each step's spread at what the seeds had spent by then, the median."""
    curves = [[(x, kind.scale * y) for x, y in kind.curve(found)] for found in runs]
    if max(map(len, curves)) > MAX_POINTS // 2:
        curves = [run_data.binned(curve, width) for curve in curves]
    spreads = band(curves, sorted({x for curve in curves for x, _ in curve}))
    if not kind.spent:
        return spreads
    result = []
    for spread in spreads:
        spent = [x for found in runs for x, _ in over(found.run, [(spread.x, 0.0)], kind.spent)]
        if spent:
            result.append(replace(spread, x=float(np.median(spent))))
    return result


def _multiple(
    results: Results,
    kind: Kind,
    arm: Arm,
    baseline: Arm | None,
    bands: dict[str, list[Spread]],
    domain: tuple[float, float],
    y_domain: tuple[float, float] | None,
) -> Chart:
    name = results.labels[arm.name]
    if not bands[arm.name]:
        return Chart(kind.title, kind.says, None, run=name, missing=[kind.why])
    shown = [(replace(GREY, name=results.labels[baseline.name]), bands[baseline.name])] if baseline else []
    shown.append((Key(name, charts.PALETTE[0]), bands[arm.name]))
    shown = [(key, spreads) for key, spreads in shown if spreads]
    curves = [Curve(key, [(spread.x, spread.median) for spread in spreads]) for key, spreads in shown]
    x = "responses generated" if kind.spent else charts.STEP
    spec = charts.lines(
        curves, x=x, y=kind.y, x_domain=domain, y_domain=y_domain,
        bands=[
            Band(key.colour, [(spread.x, spread.low, spread.high) for spread in spreads]) for key, spreads in shown
        ],
    )  # fmt: skip
    return Chart(
        kind.title,
        kind.says,
        spec,
        summary=charts.in_words(curves, "" if kind.spent else "step"),
        table=_spread_table(shown, x),
        run=name,
        keys=[key for key, _ in shown],
        domain=domain,
        height=SMALL,
    )


def _spread_table(shown: Sequence[tuple[Key, Sequence[Spread]]], x: str) -> Table:
    found = [{spread.x: spread for spread in spreads} for _, spreads in shown]
    head = [x, *(f"{key.name}{part}" for key, _ in shown for part in (", median", ", quartiles"))]
    rows: list[list[Any]] = []
    for place in sorted({place for spreads in found for place in spreads}):
        row: list[Any] = [round(place)]
        for spreads in found:
            at = spreads.get(place)
            quartiles = f"{charts.number(at.low)} to {charts.number(at.high)}" if at else None
            row += [at.median if at else None, quartiles]
        rows.append(row)
    return Table(head, rows)


# ── a few arms in a chart ──


def compared(results: Results, metric: str) -> list[Chart]:
    """A metric of report's WORDS, mean over the seeds: at most FEW arms and the baseline of their path in a chart."""
    drawn = [
        replace(
            by_run(Arms([results.pooled[arm.name] for arm in arms], _steps(results), baseline=True), metric), run=name
        )
        for name, arms in few_arms(results)
    ]
    return same_y(drawn)


def same_y(drawn: Sequence[Chart]) -> list[Chart]:
    """Charts of lines with the y axis that all of them fit on, 0 included."""
    values = [row["y"] for chart in drawn if chart.spec for row in chart.spec["data"]["values"]]
    if len(set(values)) < 2:
        return list(drawn)
    scale = {"domain": [min(0.0, *values), max(0.0, *values)], "nice": True}
    return [_with_y_scale(chart, scale) if chart.spec else chart for chart in drawn]


def _with_y_scale(chart: Chart, scale: dict[str, Any]) -> Chart:
    spec = chart.spec or {}
    encoding = {**spec["encoding"], "y": {**spec["encoding"]["y"], "scale": scale}}
    return replace(chart, spec={**spec, "encoding": encoding})


def profiles(results: Results) -> list[Chart]:
    """Performance profiles: at most FEW arms and the baseline of their path in a chart."""
    title = "Performance profile"
    says = "Share of all final accuracies, of every seed and benchmark, that are above a value; the higher, the better."
    scores = {arm.name: 100 * results.scores(arm) for arm in results.arms}
    there = np.concatenate([found.ravel() for found in scores.values()]) if scores else np.zeros(0)
    if not there.size:
        return [Chart(title, says, None, missing=["no run has a final accuracy"])]
    low, high = float(np.floor(there.min())), float(np.ceil(there.max() + 0.01))
    at = np.linspace(low, high, MAX_POINTS + 1)
    drawn = []
    for name, arms in few_arms(results):
        page = Arms([results.pooled[arm.name] for arm in arms], _steps(results), baseline=True)
        curves = [
            Curve(
                page.key(index), list(zip(at.tolist(), statistics.profile(scores[arm.name], at).tolist(), strict=True))
            )
            for index, arm in enumerate(arms)
            if scores[arm.name].size
        ]
        if not curves:
            drawn.append(Chart(title, says, None, run=name, missing=["no run has a final accuracy"]))
            continue
        x = "final accuracy, %"
        drawn.append(
            Chart(
                title, says, _steps_down(charts.lines(curves, x=x, y="share of runs and benchmarks above it",
                                         x_domain=(low, high), y_domain=(0.0, 1.0))),
                summary=charts.in_words(curves, "accuracy, %,"), run=name, keys=[curve.key for curve in curves],
                table=Table([x, *(curve.key.name for curve in curves)],
                            [[place, *(curve.points[row][1] for curve in curves)] for row, place in enumerate(at)]),
                domain=(low, high),
            )
        )  # fmt: skip
    return drawn


def _steps_down(spec: dict[str, Any]) -> dict[str, Any]:
    """No marks at the points: a profile has none of its own."""
    return {**spec, "layer": [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]}


# ── intervals ──


def final_accuracy(results: Results) -> list[Chart]:
    """Mean and interval of each arm's final accuracy, with its seeds: a chart a path."""
    means = {arm.name: 100 * results.scores(arm).mean(axis=1) for arm in results.arms}
    return _forests(
        results,
        "Final accuracy",
        "Mean over the benchmarks, pass@1: the mean over the seeds with Student's 95 % interval; small dots are the "
        "seeds, the dashed line is the baseline's mean.",
        "final accuracy, %",
        {name: found for name, values in means.items() if (found := statistics.mean_interval(values))},
        {name: values.tolist() for name, values in means.items()},
    )


def interquartile_means(results: Results) -> list[Chart]:
    """IQM of each arm: a chart a path."""
    scores = {arm.name: 100 * results.scores(arm) for arm in results.arms}
    return _forests(
        results,
        "Interquartile mean",
        "Mean of the middle half of all final accuracies, of every seed and benchmark, with a 95 % bootstrap interval "
        "over the seeds; dashed: the baseline's.",
        "interquartile mean of final accuracy, %",
        {name: statistics.iqm_interval(values) for name, values in scores.items() if len(values)},
    )


def improvements(results: Results) -> list[Chart]:
    """Probability of improvement of each arm over its path's baseline: a chart a path that has more than one arm."""
    estimates = {}
    for path in results.paths:
        baseline, *others = results.of_path(path)
        base = results.scores(baseline)
        for arm in others:
            scores = results.scores(arm)
            if len(scores) and len(base):
                estimates[arm.name] = statistics.improvement(scores, base)
    return _forests(
        results,
        "Probability of improvement",
        "Chance that a run of the arm ends above one of the baseline, averaged over the benchmarks, with a 95 % "
        "bootstrap interval; dashed: as likely as not.",
        "probability of improvement",
        estimates,
        domain=(0.0, 1.0),
        reference=0.5,
    )


def _forests(
    results: Results,
    title: str,
    says: str,
    x: str,
    estimates: dict[str, Estimate],
    single: dict[str, list[float]] | None = None,
    *,
    domain: tuple[float, float] | None = None,
    reference: float | None = None,
) -> list[Chart]:
    """Intervals of the arms, a chart a path, all with the same axis.

    Args:
        estimates: by arm.
        single: values of the seeds, by arm.
        reference: what is drawn across; the baseline's value if None, else the baseline itself is left out.
    """
    ends = [end for found in estimates.values() for end in (found.value, found.low, found.high) if end is not None]
    ends += [value for values in (single or {}).values() for value in values]
    domain = domain or (min(ends, default=0.0), max(ends, default=1.0))
    drawn = []
    for path in results.paths:
        baseline, *others = results.of_path(path)
        arms = [baseline, *others] if reference is None else others
        if not arms:
            continue
        there = [arm for arm in arms if arm.name in estimates]
        if not there:
            why = "no run has a final accuracy"
            drawn.append(Chart(title, says, None, run=PATHS.get(path, path), missing=[why]))
            continue
        base = estimates.get(baseline.name)
        rows = [_row(results, arm, estimates[arm.name], arm == baseline, (single or {}).get(arm.name)) for arm in there]
        across = base.value if reference is None and base else reference
        lacking = [results.labels[arm.name] for arm in arms if arm not in there]
        named = [(results.labels[arm.name], estimates[arm.name]) for arm in there]
        drawn.append(
            Chart(
                title,
                says,
                charts.intervals(rows, x=x, domain=domain, reference=across),
                summary="; ".join(f"{name}: {_in_words(found)}" for name, found in named) + ".",
                table=Table(
                    ["arm", x, "from", "to", "runs"],
                    [[name, found.value, found.low, found.high, found.count] for name, found in named],
                ),
                run=PATHS.get(path, path),
                missing=[f"{', '.join(lacking)}: no final accuracy"] if lacking else [],
                wide=True,
                height=60 + LINE * len(rows),
            )
        )
    return drawn


def _row(results: Results, arm: Arm, found: Estimate, is_baseline: bool, single: Sequence[float] | None) -> IntervalRow:
    colour = charts.MUTED if is_baseline else charts.PALETTE[0]
    return IntervalRow(on_axis(results.labels[arm.name]), found.value, found.low, found.high, colour, single or ())


def on_axis(name: str) -> str:
    """A name beside an axis: no control characters, at most two lines."""
    return "\n".join(textwrap.wrap(clean(name), 19, max_lines=2, placeholder=" …")) or "–"


def _in_words(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.3g} (one run)"
    return f"{found.value:.3g}, interval {found.low:.3g} to {found.high:.3g}"


# ── time ──


def phases(results: Results) -> list[Chart]:
    """Seconds of a whole run by phase, the mean over the seeds: a bar an arm, a chart a path."""
    drawn = []
    costs = {arm.name: mean_seconds(results, arm) for arm in results.arms}
    names = list(dict.fromkeys([*PHASES, *(phase for found in costs.values() for phase in found)]))
    names = [name for name in names if any(found.get(name) for found in costs.values())]
    colours = [charts.PALETTE[place] for place in (0, 1, 2, 6, 4, 5, 3)]
    colours = [colours[place % len(colours)] for place in range(len(names))]
    top = max((sum(found.values()) for found in costs.values()), default=1.0)
    says = "Seconds of all steps of a run, by what they were spent on: the mean over the seeds."
    for path in results.paths:
        arms = [arm for arm in results.of_path(path) if costs[arm.name]]
        title, path_name = "Time by phase", PATHS.get(path, path)
        if not arms:
            drawn.append(Chart(title, says, None, run=path_name, missing=["times are not recorded"]))
            continue
        labels = [results.labels[arm.name] for arm in arms]
        amounts = [[costs[arm.name].get(name, 0.0) for name in names] for arm in arms]
        words = [PHASES.get(name, name) for name in names]
        totals = [f"{label}: {charts.number(sum(row))} seconds" for label, row in zip(labels, amounts, strict=True)]
        drawn.append(
            Chart(
                title,
                says,
                charts.level_bars(
                    [on_axis(label) for label in labels], amounts, colours, x="seconds in a run", top=top
                ),
                summary="; ".join(totals) + ".",
                table=Table(["arm", *words], [[label, *row] for label, row in zip(labels, amounts, strict=True)]),
                paper="Table 2",
                run=path_name,
                wide=True,
                height=60 + LINE * len(arms),
                keys=[Key(word, colour, shape="area") for word, colour in zip(words, colours, strict=True)],
            )
        )
    return drawn


def mean_seconds(results: Results, arm: Arm) -> dict[str, float]:
    """Seconds by phase, the mean over the finished seeds."""
    costs = [results.cost(found).seconds for found in results.by_arm[arm.name] if found.finished]
    names = dict.fromkeys(name for found in costs for name in found)
    return {name: sum(found.get(name, 0.0) for found in costs) / len(costs) for name in names}

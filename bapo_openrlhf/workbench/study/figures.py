"""The figures of a study's page.

Many arms in one chart are hard to tell apart. Therefore a curve with a band of quartiles gets a chart of its own, with
the baseline of its path in grey behind it. A chart of means has at most FEW arms in addition to the baseline. Charts
of one kind have the same axes.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas

from bapo_openrlhf.record.run_record import REWARD
from bapo_openrlhf.workbench.pages import charts
from bapo_openrlhf.workbench.pages.charts import STEP, Domain
from bapo_openrlhf.workbench.pages.colours import MUTED, PALETTE, PHASE_LABELS, phase_colour
from bapo_openrlhf.workbench.pages.curves import Curve, Key, bin_width, binned, in_words, smoothed
from bapo_openrlhf.workbench.pages.figure import Figure
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import clean, duration, number
from bapo_openrlhf.workbench.report.figures import BASELINE, Comparison, by_run
from bapo_openrlhf.workbench.report.words import WORDS, Words
from bapo_openrlhf.workbench.study import statistics
from bapo_openrlhf.workbench.study.data import PATHS, RUN, Results, band
from bapo_openrlhf.workbench.study.definition import Arm
from bapo_openrlhf.workbench.study.statistics import Estimate

MAX_POINTS = 48  # points of a curve; few, because there are many curves
FEW = 5  # arms in a chart, in addition to the baseline
SMALL = 185  # height in pixels of a chart with one arm
LINE = 29  # height in pixels of one arm in a chart with a line for each arm
NO_ACCURACY = "no run has a final accuracy"


def arms_of(results: Results, arms: Sequence[Arm], *, baseline: bool = False) -> Comparison:
    """These arms as pooled runs, whose figures have the steps of the whole study on their axes."""
    return Comparison([results.pooled[arm.name] for arm in arms], results.last_step, MAX_POINTS, baseline)


# ── median and quartiles over the seeds ──


def accuracy_curves(results: Results, spent: str = "") -> list[Figure]:
    """Held-out accuracy, the mean over the benchmarks. `spent` as in `_against_baseline`."""
    title = "Held-out accuracy for responses generated" if spent else "Held-out accuracy over the steps"
    says, y = "Mean pass@1 over the benchmarks.", "held-out accuracy, %"
    curves = {run: 100 * rows.set_index("step")["accuracy"] for run, rows in results.accuracy.groupby(RUN)}
    return _against_baseline(results, Words(title, says, y, why="no evaluation was recorded"), curves, spent)


def reward_curves(results: Results, spent: str = "") -> list[Figure]:
    """Training reward, smoothed within each run. `spent` as in `_against_baseline`."""
    title = "Reward for responses generated" if spent else "Reward over the steps"
    says, y = "Mean reward of the fresh responses before the filter, smoothed.", "mean reward, smoothed"
    curves = {found.key: smoothed(found.run.curve(REWARD)) for found in results.runs}
    return _against_baseline(results, Words(title, says, y, why=f"{REWARD} is not recorded"), curves, spent)


def _against_baseline(
    results: Results, words: Words, curves: Mapping[tuple[str, int], pandas.Series], spent: str
) -> list[Figure]:
    """One figure per arm, each with the baseline of its path in grey: median and quartiles over the seeds.

    Args:
        curves: For each run (arm, seed) the values of y by step.
        spent: The running total that is on the x axis instead of the step; empty for the step.
    """
    bands = {arm.name: _band(results, arm, curves, spent) for arm in results.arms}
    whole = pandas.concat([found for found in bands.values() if len(found)] or [band([])])
    if whole.empty:
        return [words.figure(missing=[words.why])]
    first, last = float(whole.index.min()), float(whole.index.max())
    domain = (0.0, last or 1.0) if spent else (min(1.0, first), max(results.last_step, last, 2.0))
    low, high = float(whole["low"].min()), float(whole["high"].max())
    axes: dict[str, Any] = {"x_domain": domain, "y_domain": (low, high) if low < high else None}
    x, x_name = ("responses generated", "") if spent else (STEP, "step")
    drawn = []
    for path in results.paths:
        baseline, *others = results.of_path(path)
        for arm in others or [baseline]:
            name = results.labels[arm.name]
            figure = replace(words.figure(name, [words.why]), height=SMALL)
            keys = {
                baseline.name: replace(BASELINE, name=results.labels[baseline.name]),
                arm.name: Key(name, PALETTE[0]),
            }
            shown = [Curve(key, bands[of]["median"], band=bands[of]) for of, key in keys.items() if len(bands[of])]
            if len(bands[arm.name]):
                chart, told = charts.lines(shown, x=x, y=words.y, **axes), in_words(shown, x_name)
                more = {"summary": told, "table": _quartiles(shown, x), "missing": ()}
                figure = figure.with_curves(shown, chart, x, domain, **more)
            drawn.append(figure)
    return drawn


def _band(results: Results, arm: Arm, of_runs: Mapping[tuple[str, int], pandas.Series], spent: str) -> pandas.DataFrame:
    """Median and quartiles of an arm over the steps, or over the median of what its seeds had spent by these steps."""
    runs = [found.key for found in results.by_arm[arm.name]]
    curves = [of_runs[run] for run in runs if run in of_runs]
    # Over a running total, each curve has places of its own, and so rows of its own in the table.
    few = MAX_POINTS // 2
    if max(map(len, curves), default=0) > few:
        width = bin_width(results.last_step, few if spent else MAX_POINTS)
        curves = [binned(curve, width) for curve in curves]
    found = band(curves)
    if not spent:
        return found
    places = pandas.DataFrame([(*run, step) for step in found.index for run in runs], columns=[*RUN, "step"])
    medians = results.spent(places, spent).groupby("step")[spent].median()
    return found.loc[medians.index].set_axis(medians)


def _quartiles(curves: Sequence[Curve], x: str) -> Table:
    """The median and the quartiles of each curve, one row per x."""
    columns = {}
    for curve in curves:
        found = curve.band[~curve.band.index.duplicated(keep="last")]
        columns[f"{curve.key.name}, median"] = found["median"]
        columns[f"{curve.key.name}, quartiles"] = found["low"].map(number) + " to " + found["high"].map(number)
    frame = pandas.DataFrame(columns).sort_index()
    frame.insert(0, x, [round(place) for place in frame.index], allow_duplicates=True)
    return Table(frame)


# ── a few arms in a chart ──


def few_arms(results: Results) -> list[tuple[str, list[Arm]]]:
    """The arms in parts for one chart each: the name of the part, then the baseline and at most FEW other arms."""
    found = []
    for path in results.paths:
        baseline, *others = results.of_path(path)
        count = max(1, math.ceil(len(others) / FEW))
        parts = [others[place * len(others) // count : (place + 1) * len(others) // count] for place in range(count)]
        for place, part in enumerate(parts, start=1):
            name = PATHS.get(path, path) + (f", part {place} of {len(parts)}" if len(parts) > 1 else "")
            found.append((name, [baseline, *part]))
    return found


def compared(results: Results, metric: str) -> list[Figure]:
    """A metric of WORDS, as means over the seeds. A chart has at most FEW arms and the baseline of their path."""
    parts = [(name, arms_of(results, arms, baseline=True)) for name, arms in few_arms(results)]
    drawn = [binned(run.curve(metric), page.width, peaks=WORDS[metric].peaks) for _, page in parts for run in page.runs]
    ends = [end for values in drawn if len(values) for end in (values.min(), values.max())]
    y_domain = (min(0.0, *ends), max(0.0, *ends)) if len(set(ends)) > 1 else None
    return [replace(by_run(page, metric, y_domain), run=name) for name, page in parts]


def profiles(results: Results) -> list[Figure]:
    """Performance profiles. A chart has at most FEW arms and the baseline of their path."""
    title = "Performance profile"
    says = "Share of all final accuracies, of every seed and benchmark, that are above a value; the higher, the better."
    scores = {arm.name: 100 * results.scores(arm) for arm in results.arms}
    there = np.concatenate([found.ravel() for found in scores.values()])
    if not there.size:
        return [Figure(title, says, missing=[NO_ACCURACY])]
    domain = (float(np.floor(there.min())), float(np.ceil(there.max() + 0.01)))
    at, x = np.linspace(*domain, MAX_POINTS + 1), "final accuracy, %"
    drawn = []
    for name, arms in few_arms(results):
        page = arms_of(results, arms, baseline=True)
        curves = [
            Curve(page.key(place), pandas.Series(statistics.profile(scores[arm.name], at), at))
            for place, arm in enumerate(arms)
            if scores[arm.name].size
        ]
        figure = Figure(title, says, run=name)
        if not curves:
            drawn.append(replace(figure, missing=[NO_ACCURACY]))
            continue
        y = "share of runs and benchmarks above it"
        chart = charts.lines(curves, x=x, y=y, x_domain=domain, y_domain=(0.0, 1.0))
        drawn.append(figure.with_curves(curves, chart, x, domain, summary=in_words(curves, "accuracy, %,")))
    return drawn


# ── intervals ──


def final_accuracy(results: Results) -> list[Figure]:
    """Mean and interval of each arm's final accuracy, with its seeds: one figure per path."""
    says = (
        "Mean over the benchmarks, pass@1: the mean over the seeds with Student's 95 % interval; small dots are the "
        "seeds, the dashed line is the baseline's mean."
    )
    means = {arm.name: (100 * results.scores(arm).mean(axis=1)).tolist() for arm in results.arms}
    estimates = {name: found for name, values in means.items() if (found := statistics.mean_interval(values))}
    return _forests(results, Figure("Final accuracy", says), "final accuracy, %", estimates, means)


def interquartile_means(results: Results) -> list[Figure]:
    """Interquartile mean of each arm: one figure per path."""
    says = (
        "Mean of the middle half of all final accuracies, of every seed and benchmark, with a 95 % bootstrap interval "
        "over the seeds; dashed: the baseline's."
    )
    scores = {arm.name: 100 * results.scores(arm) for arm in results.arms}
    estimates = {name: statistics.iqm_interval(values) for name, values in scores.items() if len(values)}
    figure = Figure("Interquartile mean", says)
    return _forests(results, figure, "interquartile mean of final accuracy, %", estimates)


def improvements(results: Results) -> list[Figure]:
    """Probability of improvement of each arm over its baseline: one figure per path that has more than one arm."""
    says = (
        "Chance that a run of the arm ends above one of the baseline, averaged over the benchmarks, with a 95 % "
        "bootstrap interval; dashed: as likely as not."
    )
    estimates = {}
    for path in results.paths:
        base, *others = ((arm.name, results.scores(arm)) for arm in results.of_path(path))
        if len(base[1]):
            estimates |= {name: statistics.improvement(scores, base[1]) for name, scores in others if len(scores)}
    figure = Figure("Probability of improvement", says)
    return _forests(results, figure, "probability of improvement", estimates, domain=(0.0, 1.0), reference=0.5)


def _forests(
    results: Results,
    figure: Figure,
    x: str,
    estimates: Mapping[str, Estimate],
    single: Mapping[str, Sequence[float]] | None = None,
    *,
    domain: Domain | None = None,
    reference: float | None = None,
) -> list[Figure]:
    """The figure once per path, with the intervals of the arms, all with the same axis.

    Args:
        estimates: The estimates by the arm's name.
        single: The values of the seeds by the arm's name.
        reference: The value of the line across. If it is None, the line is at the baseline's value; otherwise the
            baseline itself is left out.
    """
    columns = dict.fromkeys(("value", "low", "high"), float)
    numbers = pandas.DataFrame(estimates.values(), [*estimates], [*columns, "count"]).astype(columns)
    seeds = [(name, value) for name, values in (single or {}).items() for value in values]
    ends = [*numbers[[*columns]].stack(), *(value for _, value in seeds)]
    domain = domain or (min(ends, default=0.0), max(ends, default=1.0))
    drawn = []
    for path in results.paths:
        baseline, *others = results.of_path(path)
        labels = {arm.name: results.labels[arm.name] for arm in ([baseline, *others] if reference is None else others)}
        found = numbers.loc[[name for name in labels if name in estimates]]
        of_path = replace(figure, run=PATHS.get(path, path), missing=[NO_ACCURACY])
        if len(found):
            colours = [MUTED if name == baseline.name else PALETTE[0] for name in found.index]
            rows = found.assign(name=[on_axis(labels[name]) for name in found.index], colour=colours)
            dots = [(on_axis(labels[name]), value) for name, value in seeds if name in found.index]
            across = estimates[baseline.name].value if reference is None and baseline.name in estimates else reference
            single_values = pandas.DataFrame(dots, columns=["name", "value"])
            lacking = ", ".join(label for name, label in labels.items() if name not in estimates)
            table = found.set_axis(found.index.map(labels)).rename_axis("arm").reset_index()
            of_path = replace(
                of_path,
                chart=charts.intervals(rows, x=x, domain=domain, reference=across, single=single_values),
                summary="; ".join(f"{labels[name]}: {_in_words(estimates[name])}" for name in found.index) + ".",
                table=Table(table.set_axis(["arm", x, "from", "to", "runs"], axis=1)),
                missing=[f"{lacking}: no final accuracy"] if lacking else [],
                wide=True,
                height=60 + LINE * len(found),
            )
        if labels:
            drawn.append(of_path)
    return drawn


def on_axis(name: str) -> str:
    """A name on an axis: at most two lines, without control characters."""
    return "\n".join(textwrap.wrap(clean(name), 19, max_lines=2, placeholder=" …")) or "–"


def _in_words(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.3g} (one run)"
    return f"{found.value:.3g}, interval {found.low:.3g} to {found.high:.3g}"


# ── time ──


def phases(results: Results) -> list[Figure]:
    """Seconds of a whole run by phase, the mean over the seeds: one bar per arm, and one figure per path."""
    says = "Seconds of all steps of a run, by what they were spent on: the mean over the seeds."
    spent = results.seconds.dropna(how="all").fillna(0.0)
    spent = spent.loc[:, (spent > 0).any()].rename(columns=PHASE_LABELS)
    keys = [Key(phase, phase_colour(place), shape="area") for place, phase in enumerate(spent)]
    top = float(spent.sum(axis=1).max())
    drawn = []
    for path in results.paths:
        figure = Figure("Time by phase", says, run=PATHS.get(path, path), missing=["times are not recorded"])
        amounts = spent.loc[[arm.name for arm in results.of_path(path) if arm.name in spent.index]]
        if amounts.size:
            labels = [results.labels[name] for name in amounts.index]
            bars, colours = amounts.set_axis([*map(on_axis, labels)]), [key.colour for key in keys]
            totals = zip(labels, amounts.sum(axis=1), strict=True)
            figure = replace(
                figure,
                chart=charts.level_bars(bars, colours, x="seconds in a run", top=top),
                summary="; ".join(f"{label}: {duration(total)}" for label, total in totals) + ".",
                table=Table(amounts.set_axis(labels).rename_axis("arm").reset_index()),
                paper="Table 2",
                missing=(),
                wide=True,
                height=60 + LINE * len(amounts),
                keys=keys,
            )
        drawn.append(figure)
    return drawn

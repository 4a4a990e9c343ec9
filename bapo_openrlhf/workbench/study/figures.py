"""The figures of a study's page.

Many arms in one chart are hard to tell apart. Therefore a curve with a band of quartiles gets a chart of its own, with
the baseline of its path in grey behind it. A chart of means has at most FEW arms in addition to the baseline. Charts
of one kind have the same axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas

from bapo_openrlhf.record.run_record import REWARD
from bapo_openrlhf.workbench.pages import charts
from bapo_openrlhf.workbench.pages.charts import STEP
from bapo_openrlhf.workbench.pages.colours import PALETTE
from bapo_openrlhf.workbench.pages.curves import Curve, Key, bin_width, binned, in_words, smoothed
from bapo_openrlhf.workbench.pages.figure import Figure
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import number
from bapo_openrlhf.workbench.report.figures import BASELINE, Comparison, by_run
from bapo_openrlhf.workbench.report.words import WORDS, Words
from bapo_openrlhf.workbench.study.data import PATHS, RUN, Results, band
from bapo_openrlhf.workbench.study.definition import Arm

MAX_POINTS = 48  # points of a curve; few, because there are many curves
FEW = 5  # arms in a chart, in addition to the baseline
SMALL = 185  # height in pixels of a chart with one arm


def arms_of(results: Results, arms: Sequence[Arm], *, baseline: bool = False) -> Comparison:
    """These arms as pooled runs, whose figures have the steps of the whole study on their axes."""
    return Comparison([results.pooled[arm.name] for arm in arms], results.last_step, MAX_POINTS, baseline)


# ── median and quartiles over the seeds ──


def accuracy_curves(results: Results, spent: str = "") -> list[Figure]:
    """Held-out accuracy, the mean over the benchmarks. `spent` as in `_against_baseline`."""
    title = "Held-out accuracy for responses generated" if spent else "Held-out accuracy over the steps"
    says, y = "Mean pass@1 over the benchmarks.", "held-out accuracy, %"
    curves = {run: 100 * rows.set_index("step")["accuracy"] for run, rows in results.accuracy.groupby(RUN)}
    return _against_baseline(results, Words(title, says, y, why=results.why_no_accuracy), curves, spent)


def reward_curves(results: Results, spent: str = "") -> list[Figure]:
    """Training reward, smoothed within each run. `spent` as in `_against_baseline`."""
    title = "Reward for responses generated" if spent else "Reward over the steps"
    says, y = "Mean reward of the fresh responses before the filter, smoothed.", "mean reward, smoothed"
    curves = {study_run.key: smoothed(study_run.run.curve(REWARD)) for study_run in results.runs}
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
    whole = pandas.concat([curve_band for curve_band in bands.values() if len(curve_band)] or [band([])])
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
    runs = [study_run.key for study_run in results.by_arm[arm.name]]
    curves = [of_runs[run] for run in runs if run in of_runs]
    # Over a running total, each curve has places of its own, and so rows of its own in the table.
    few = MAX_POINTS // 2
    if max(map(len, curves), default=0) > few:
        width = bin_width(results.last_step, few if spent else MAX_POINTS)
        curves = [binned(curve, width) for curve in curves]
    quartiles = band(curves)
    if not spent:
        return quartiles
    places = pandas.DataFrame([(*run, step) for step in quartiles.index for run in runs], columns=[*RUN, "step"])
    medians = results.spent(places, spent).groupby("step")[spent].median()
    return quartiles.loc[medians.index].set_axis(medians)


def _quartiles(curves: Sequence[Curve], x: str) -> Table:
    """The median and the quartiles of each curve, one row per x."""
    columns = {}
    for curve in curves:
        rows = curve.band[~curve.band.index.duplicated(keep="last")]
        columns[f"{curve.key.name}, median"] = rows["median"]
        columns[f"{curve.key.name}, quartiles"] = rows["low"].map(number) + " to " + rows["high"].map(number)
    frame = pandas.DataFrame(columns).sort_index()
    frame.insert(0, x, [round(place) for place in frame.index], allow_duplicates=True)
    return Table(frame)


# ── a few arms in a chart ──


def few_arms(results: Results) -> list[tuple[str, list[Arm]]]:
    """The arms in parts for one chart each: the name of the part, then the baseline and at most FEW other arms."""
    result = []
    for path in results.paths:
        baseline, *others = results.of_path(path)
        count = max(1, math.ceil(len(others) / FEW))
        parts = [others[place * len(others) // count : (place + 1) * len(others) // count] for place in range(count)]
        for place, part in enumerate(parts, start=1):
            name = PATHS.get(path, path) + (f", part {place} of {len(parts)}" if len(parts) > 1 else "")
            result.append((name, [baseline, *part]))
    return result


def compared(results: Results, metric: str) -> list[Figure]:
    """A metric of WORDS, as means over the seeds. A chart has at most FEW arms and the baseline of their path."""
    parts = [(name, arms_of(results, arms, baseline=True)) for name, arms in few_arms(results)]
    drawn = [binned(run.curve(metric), page.width, peaks=WORDS[metric].peaks) for _, page in parts for run in page.runs]
    ends = [end for values in drawn if len(values) for end in (values.min(), values.max())]
    y_domain = (min(0.0, *ends), max(0.0, *ends)) if len(set(ends)) > 1 else None
    return [replace(by_run(page, metric, y_domain), run=name) for name, page in parts]

"""The figures of a study's page. Charts of one kind have the same axes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas

from bapo_openrlhf.record.run_record import REWARD
from bapo_openrlhf.workbench.pages import charts
from bapo_openrlhf.workbench.pages.charts import STEP, Curve, bin_width, binned, curves_in_words, smoothed
from bapo_openrlhf.workbench.pages.colours import MUTED, PALETTE
from bapo_openrlhf.workbench.pages.figure import Figure
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import clean
from bapo_openrlhf.workbench.report.figures import PEAKS, Comparison, by_run
from bapo_openrlhf.workbench.study.data import PATHS, RUN, Results, band
from bapo_openrlhf.workbench.study.definition import Arm
from bapo_openrlhf.workbench.study.statistics import mean_interval

MAX_POINTS = 48  # points of a curve; few, because there are many curves
FEW = 3  # arms in a chart, in addition to the baseline
ROW = 24  # height in pixels of an arm in the chart of all arms
RunCurves = Mapping[tuple[str, int], pandas.Series]  # a curve of each run by the names of its arm and its seed


def comparison_of(results: Results, arms: Sequence[Arm], *, baseline: bool = False) -> Comparison:
    """These arms as pooled runs, whose figures have the steps of the whole study on their axes."""
    return Comparison([results.pooled[arm.name] for arm in arms], results.last_step, MAX_POINTS, baseline)


def outcome(results: Results) -> Figure:
    """The end of every arm: held-out accuracy, or without it the reward of the last steps."""
    ends, what = 100 * results.final.mean(axis=1), "held-out accuracy, %"
    if results.final.empty:
        ends, what = results.finished_numbers["reward_end"].dropna(), "mean reward of the last steps"
    estimates = [(arm, estimate) for arm in results.arms if (estimate := mean_interval(results.rows_of_arm(ends, arm)))]
    sentence = f"{what.capitalize()}: the mean over the finished seeds of each arm, with Student's 95 % interval."
    figure = Figure("All arms at their end", sentence, wide=True, height=60 + ROW * len(estimates))
    if not estimates:
        return figure
    baselines = {results.arms_of_path(path)[0].name for path in results.paths}
    colours = {path: PALETTE[place] for place, path in enumerate(results.paths)}
    columns = ["name", "value", "low", "high", "colour"]
    rows = [
        (clean(results.labels[arm.name]), e.value, e.low, e.high, MUTED if arm.name in baselines else colours[arm.path])
        for arm, e in estimates
    ]
    frame = pandas.DataFrame(rows, columns=columns).astype({"low": float, "high": float})
    summary = ", ".join(f"{name} {value:.3g}" for name, value, *_ in rows)
    table = Table(frame[["name", "value", "low", "high"]].rename(columns={"name": "arm", "value": "mean"}))
    return replace(figure, chart=charts.intervals(frame, x=what), summary=summary, table=table)


# ── a few arms in a chart ──


def few_arms(results: Results) -> list[tuple[str, list[Arm]]]:
    """The arms in parts for one chart each: the name of the part, then the baseline and at most FEW other arms."""
    result = []
    for path in results.paths:
        baseline, *others = results.arms_of_path(path)
        count = max(1, math.ceil(len(others) / FEW))
        parts = [others[place * len(others) // count : (place + 1) * len(others) // count] for place in range(count)]
        for place, part in enumerate(parts, start=1):
            name = PATHS.get(path, path) + (f", part {place} of {len(parts)}" if len(parts) > 1 else "")
            result.append((name, [baseline, *part]))
    return result


def arms_over_steps(results: Results, *metrics: str) -> list[Figure]:
    """Metrics over the steps: of each a figure for each part of the arms, all with the same axes."""
    parts = [(name, comparison_of(results, arms, baseline=True)) for name, arms in few_arms(results)]
    result = []
    for metric in metrics:
        peaks = metric in PEAKS
        curves = [binned(run.curve(metric), page.width, peaks=peaks) for _, page in parts for run in page.runs]
        ends = [end for values in curves if len(values) for end in (values.min(), values.max())]
        y_domain = (min(0.0, *ends), max(0.0, *ends)) if len(set(ends)) > 1 else None
        result += [replace(by_run(page, metric, y_domain), run=name) for name, page in parts]
    return result


# ── median and quartiles over the seeds ──


def accuracy_curves(results: Results, total: str = "") -> list[Figure]:
    """Held-out accuracy over the steps, or over the running total `total` if it is not empty."""
    curves = {run: 100 * rows.set_index("step")["accuracy"] for run, rows in results.accuracy.groupby(RUN)}
    figure = Figure("Held-out accuracy", "Mean pass@1 over the benchmarks.")
    return _quartiles(results, figure, "held-out accuracy, %", curves, total)


def reward_curves(results: Results, total: str = "") -> list[Figure]:
    """The same of the training reward, which is smoothed within each run."""
    curves = {study_run.key: smoothed(study_run.run.curve(REWARD)) for study_run in results.runs}
    sentence = "Mean reward of the fresh responses before the filter, smoothed."
    return _quartiles(results, Figure("Reward", sentence), "mean reward, smoothed", curves, total)


def _quartiles(results: Results, figure: Figure, y: str, curves: RunCurves, total: str) -> list[Figure]:
    x = "responses generated" if total else STEP
    figure = replace(figure, title=f"{figure.title} for {x}" if total else f"{figure.title} over the steps")
    bands = {arm.name: _band(results, arm, curves, total) for arm in results.arms}
    whole = pandas.concat([*bands.values(), band([])])
    if whole.empty:
        return []
    first, last = float(whole.index.min()), float(whole.index.max())
    domain = (0.0, last or 1.0) if total else (min(1.0, first), max(results.last_step, last, 2.0))
    low, high = float(whole["low"].min()), float(whole["high"].max())
    result = []
    for name, arms in few_arms(results):
        page = comparison_of(results, arms, baseline=True)
        lines = [
            Curve(page.key(place), bands[arm.name]["median"], band=bands[arm.name])
            for place, arm in enumerate(arms)
            if len(bands[arm.name])
        ]
        if lines:
            chart = charts.lines(lines, x=x, y=y, x_domain=domain, y_domain=(low, high) if low < high else None)
            summary = curves_in_words(lines, "" if total else "step")
            result.append(replace(figure, run=name).with_curves(lines, chart, x, summary=summary))
    return result


def _band(results: Results, arm: Arm, curves: RunCurves, total: str) -> pandas.DataFrame:
    """Median and quartiles of an arm over the steps, or over the median of the total that its seeds had by them.

    A seed counts up to its last step.
    """
    runs = [study_run.key for study_run in results.by_arm[arm.name] if study_run.key in curves]
    of_seeds = [curves[run] for run in runs]
    if max(map(len, of_seeds), default=0) > MAX_POINTS // 2:
        of_seeds = [binned(curve, bin_width(results.last_step, MAX_POINTS // 2)) for curve in of_seeds]
    quartiles = band(of_seeds)
    if not total:
        return quartiles
    ends = {run: curve.index[-1] for run, curve in zip(runs, of_seeds, strict=True) if len(curve)}
    rows = [(*run, step) for step in quartiles.index for run, end in ends.items() if step <= end]
    places = pandas.DataFrame(rows, columns=[*RUN, "step"])
    medians = results.with_total(places, total).groupby("step")[total].median()
    return quartiles.loc[medians.index].set_axis(medians)

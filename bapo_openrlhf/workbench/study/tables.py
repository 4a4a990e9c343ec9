"""The tables of a study's page."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas

from bapo_openrlhf.adapt.vocabulary import SOURCES, shown_sources
from bapo_openrlhf.workbench.pages.colours import PHASE_LABELS, SOURCE_LABELS
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import duration, is_number, many
from bapo_openrlhf.workbench.report.accuracy import PAPER, hard_prompts, why_no_bins
from bapo_openrlhf.workbench.report.tables import different_flags, share
from bapo_openrlhf.workbench.study import statistics
from bapo_openrlhf.workbench.study.data import PATHS, ROLLOUTS, UPDATE_TOKENS, Results
from bapo_openrlhf.workbench.study.definition import words_of
from bapo_openrlhf.workbench.study.statistics import Estimate

# ── at a glance ──


def overview(results: Results) -> Table:
    """Every arm in a few numbers, which are means over its finished seeds."""
    head = ["arm", "advantages", "seeds", "final accuracy, mean of the benchmarks, %"]
    head += [*(f"{name}, %" for name in results.study.evaluations), "reward, last steps"]
    rows: list[list[Any]] = []
    for arm in results.arms:
        numbers, scores = results.rows_of_arm(results.finished_numbers, arm), 100 * results.scores(arm)
        rows.append([
            results.labels[arm.name], arm.path, f"{len(numbers)} of {len(arm.seeds or results.study.seeds)}",
            _with_interval(statistics.mean_interval(scores.mean(axis=1)) if len(scores) else None),
            *([f"{mean:.1f}" for mean in scores.mean(axis=0)] if len(scores) else ["–"] * scores.shape[1]),
            numbers["reward_end"].mean(),
        ])  # fmt: skip
    return Table.of(head, rows, "Means over the finished seeds; in brackets Student's 95 % interval")


def costs(results: Results) -> Table:
    numbers, rows = results.finished_numbers[["rollouts", "tokens_trained", "update_tokens", "seconds"]], []
    for arm in results.arms:
        *counts, seconds = results.rows_of_arm(numbers, arm).mean()
        rows.append([results.labels[arm.name], *counts, None if pandas.isna(seconds) else duration(seconds)])
    head = ["arm", "responses generated", "tokens trained on", "update tokens", "time of all steps"]
    title = (
        "Means over the finished seeds. Update tokens: also those of worked solutions and of the critic, times the "
        "number of epochs"
    )
    return Table.of(head, rows, title)


def _with_interval(estimate: Estimate | None, words: Callable[[float], str] = "{:.1f}".format) -> str:
    if estimate is None:
        return "–"
    interval = "" if estimate.low is None else f" [{words(estimate.low)}, {words(estimate.high)}]"
    return f"{words(estimate.value)}{interval}"


# ── final accuracy ──


def tests(results: Results) -> list[Table]:
    """Each arm against the baseline of its path, paired by seed; a table per path. One pair has no p: it would be 1."""
    finals = {arm.name: 100 * results.rows_of_arm(results.final, arm) for arm in results.arms}
    result = []
    for path in results.paths:
        baseline, *others = results.arms_of_path(path)
        base_finals = finals[baseline.name]
        changes = {arm.name: (finals[arm.name] - base_finals).dropna() for arm in others}
        by_seed = {name: change.mean(axis=1) for name, change in changes.items() if len(change)}
        if not by_seed:
            continue
        p_values = {name: statistics.sign_flip_p(change) for name, change in by_seed.items() if len(change) > 1}
        adjusted = dict(zip(p_values, statistics.holm([*p_values.values()]), strict=True))
        rows = []
        for name, change in by_seed.items():
            sides = [side.loc[change.index].to_numpy().mean() for side in (finals[name], base_finals)]
            counts = [str((statistics.sign(change) == sign).sum()) for sign in (1, 0, -1)]
            rows.append([
                results.labels[name], len(change), *(f"{mean:.1f}" for mean in sides),
                _with_interval(statistics.mean_interval(change), with_sign), " / ".join(counts),
                *(f"{values[name]:.3f}" if name in values else "–" for values in (p_values, adjusted)),
                *map(with_sign, changes[name].mean()),
            ])  # fmt: skip
        base, most = results.labels[baseline.name], max(map(len, by_seed.values()))
        smallest, name = statistics.smallest_p(most), PATHS.get(path, path)
        title = f"{name[0].upper()}{name[1:]}: against {base}, paired by seed"
        if p_values:
            title += (
                f". With {many(most, 'pair')}, no p is below {smallest:.3g}; with {many(len(p_values), 'arm')}, none "
                f"is below {min(1.0, len(p_values) * smallest):.3g} after Holm's correction"
            )
        head = ["arm", "pairs", "its accuracy, %", f"{base}, %", "difference, points", "better / equal / worse"]
        head += ["p", "p, Holm", *(f"{name}, points" for name in results.study.evaluations)]
        result.append(Table.of(head, rows, title))
    return result


def with_sign(value: float) -> str:
    """A number with its sign and one digit after the point. A zero has no minus."""
    return f"{round(value, 1) + 0.0:+.1f}"


def every_run(results: Results) -> Table:
    """The final evaluation of every run, with each pass@k."""
    prefixes = tuple(f"eval_{name}_pass" for name in results.study.evaluations)
    last_rows = [row for study_run in results.runs for row in study_run.run.evaluations[-1:]]
    names = dict.fromkeys(key for row in last_rows for key in sorted(row) if key.startswith(prefixes))
    rows = []
    for arm in results.arms:
        for study_run in results.by_arm[arm.name]:
            last = study_run.run.evaluations[-1] if study_run.run.evaluations else {}
            values = [f"{100 * last[key]:.1f}" if is_number(last.get(key)) else "–" for key in names]
            state = "" if study_run.finished else "stopped early"
            rows.append([results.labels[arm.name], str(study_run.seed), str(last.get("step", "–")), *values, state])
    head = ["arm", "seed", "step", *(f"{_benchmark(key)}, %" for key in names), ""]
    return Table.of(head, rows, f"The last evaluation of each of {len(rows)} runs")


def _benchmark(key: str) -> str:
    """A key such as eval_cd34_pass4 in words: cd34 pass@4."""
    name, _, k = key.removeprefix("eval_").rpartition("_pass")
    return f"{name} pass@{k}"


# ── until an accuracy was reached ──


def target_costs(results: Results, target: float) -> Table:
    rollouts, tokens = results.total_at_target(target, ROLLOUTS), results.total_at_target(target, UPDATE_TOKENS)
    rows: list[list[Any]] = []
    for path in results.paths:
        baseline = results.arms_of_path(path)[0]
        base = results.rows_of_arm(rollouts, baseline)
        for arm in results.arms_of_path(path):
            seeds = results.accuracy.loc[results.accuracy["arm"] == arm.name, "seed"].nunique()
            responses = results.rows_of_arm(rollouts, arm)
            ratios = (responses / base)[(responses > 0) & (base > 0)]  # 0: the target was reached before training
            ratio = statistics.ratio_interval(ratios) if arm != baseline else None
            costs = (responses, results.rows_of_arm(tokens, arm))
            medians = [round(cost.median()) if len(cost) else None for cost in costs]
            rows.append([
                results.labels[arm.name], path, f"{len(responses)} of {seeds}", *medians,
                "× " + _with_interval(ratio, "{:.2f}".format) if ratio else "–", ratio.count if ratio else None,
            ])  # fmt: skip
    head = ["arm", "advantages", "seeds that got there", "responses generated, median", "update tokens, median"]
    head += ["responses, ratio to the baseline", "pairs"]
    title = (
        f"Until a held-out accuracy of {target:.1%}: medians over the seeds that got there; the ratio is the geometric "
        "mean over the seeds where both did, with its 95 % interval"
    )
    return Table.of(head, rows, title)


# ── cost, batches, prompts ──


def seconds(results: Results) -> Table:
    phases = results.seconds.reindex([arm.name for arm in results.arms])
    totals, rows = phases.sum(axis=1, min_count=1), []
    for path in results.paths:
        base = totals[results.arms_of_path(path)[0].name]
        for arm in results.arms_of_path(path):
            total = totals[arm.name]
            times = "–" if pandas.isna(total) else duration(total)
            times += f" (× {total / base:.2f})" if base > 0 and total > 0 else ""
            parts = ["–" if pandas.isna(value) else duration(value) for value in phases.loc[arm.name]]
            rows.append([results.labels[arm.name], times, *parts])
    head = ["arm", "all phases", *(PHASE_LABELS.get(name, name) for name in phases)]
    title = "Time of a run by phase, means over the seeds; in brackets the ratio to the path's baseline"
    return Table.of(head, rows, title)


def sources(results: Results) -> Table:
    """The sources of the groups that were trained on, over whole runs."""
    by_arm = results.means.groupby("arm")
    totals, capacity_used = by_arm.sum(), by_arm["groups/capacity_used"].mean()
    of_pages = shown_sources({source: totals[f"groups/{source}"].sum() for source in SOURCES})
    rows = []
    for arm in results.arms:
        counts = totals.loc[arm.name, [f"groups/{source}" for source in of_pages]]
        shares = [share(count, counts.sum()) for count in counts]
        used = capacity_used[arm.name]
        rows.append([results.labels[arm.name], *shares, "–" if pandas.isna(used) else f"{used:.0%}"])
    head = ["arm", *(SOURCE_LABELS[source] for source in of_pages), "capacity used"]
    title = "Groups trained on in a run, means over the seeds. In the paper 40 to 60 % are fresh (A.6)"
    return Table.of(head, rows, title)


def later_solutions(results: Results) -> list[Table]:
    """How many of the prompts that were not solved at first were solved later; no table without such prompts."""
    rows: list[list[Any]] = []
    for arm in results.arms:
        ended = [study_run.run for study_run in results.by_arm[arm.name] if study_run.finished]
        runs = [run for run in ended if not why_no_bins(run)]
        counts = pandas.DataFrame([seed for seed in map(hard_prompts, [run.groups for run in runs]) if seed.prompts])
        if counts.empty:
            continue
        solutions = [100 * (counts[name] / counts["prompts"]) for name in ("solutions", "latest_solutions")]
        shares = [_with_interval(statistics.mean_interval(part)) for part in solutions]
        rows.append([results.labels[arm.name], len(counts), counts["prompts"].mean(), *shares])
    head = ["arm", "seeds", "prompts not solved at first", "solved by a later group, %", "by the latest group, %"]
    title = (
        f"Prompts whose first group had no right response: means over the seeds with 95 % intervals. {PAPER}. An arm "
        "that tries such prompts more often also solves more of them by chance"
    )
    return [Table.of(head, rows, title)] if rows else []


# ── what was run ──


def arms(results: Results) -> Table:
    rows = []
    for arm in results.study.arms:
        words = " ".join(words_of([Path(file).name for file in arm.config], arm.flags)) or "–"
        rows.append([results.labels[arm.name], arm.name, len(results.by_arm[arm.name]), words])
    return Table.of(["arm", "name", "runs", "flags"], rows, "Arms of the study")


def flags(results: Results) -> list[Table]:
    """Flags that differ between the first runs of the arms, including those of the machine; none for one arm."""
    first = [replace(results.by_arm[arm.name][0].run, name=results.labels[arm.name]) for arm in results.arms]
    return different_flags(first)


def provenance(metadata: Mapping[str, Any]) -> Table:
    rows: list[list[Any]] = []
    for name, value in metadata.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        rows += [[f"{name}: {part}" if part else name, str(content)] for part, content in parts]
    return Table.of(["", "value"], rows)

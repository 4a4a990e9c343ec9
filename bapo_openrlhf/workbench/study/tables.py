"""The tables of a study's page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo_openrlhf.record.run_record import SOURCES, summarise
from bapo_openrlhf.workbench.plot import LABELS
from bapo_openrlhf.workbench.report import data as run_data
from bapo_openrlhf.workbench.report.charts import Table, number
from bapo_openrlhf.workbench.report.figures import PHASES, why_no_bins
from bapo_openrlhf.workbench.report.runs import is_number
from bapo_openrlhf.workbench.report.tables import different_flags
from bapo_openrlhf.workbench.study import statistics
from bapo_openrlhf.workbench.study.data import PATHS, Results, StudyRun, epochs
from bapo_openrlhf.workbench.study.definition import Arm
from bapo_openrlhf.workbench.study.figures import mean_seconds
from bapo_openrlhf.workbench.study.statistics import Estimate

Values = Sequence[float | None]

# ── at a glance ──


def overview(results: Results) -> Table:
    """Every arm in a few numbers: means over its finished seeds."""
    head = ["arm", "advantages", "seeds", "final accuracy, mean of the benchmarks, %"]
    head += [f"{name}, %" for name in results.study.evaluations]
    head += ["reward, last steps", "responses generated", "tokens trained on", "update tokens", "seconds of all steps"]
    facts: list[Callable[[StudyRun], float | None]] = [
        lambda found: summarise(found.run.rows)["reward_end"],
        lambda found: results.cost(found).rollouts,
        lambda found: results.cost(found).tokens_trained,
        results.update_tokens,
        lambda found: results.cost(found).total_seconds,
    ]
    rows: list[list[Any]] = []
    for arm in _arms(results):
        finished = [found for found in results.by_arm[arm.name] if found.finished]
        scores = 100 * results.scores(arm)
        row: list[Any] = [results.labels[arm.name], arm.path]
        row += [
            f"{len(finished)} of {len(results.study.seeds)}",
            percent(statistics.mean_interval(scores.mean(axis=1))),
        ]
        row += [f"{mean:.1f}" for mean in scores.mean(axis=0)] if len(scores) else ["–"] * scores.shape[1]
        row += [_mean([fact(found) for found in finished]) for fact in facts]
        rows.append(row)
    title = (
        "Means over the finished seeds; in brackets Student's 95 % interval. Update tokens: tokens trained on, as "
        "often as each batch was"
    )
    return Table(head, rows, title)


def _arms(results: Results) -> list[Arm]:
    return [arm for path in results.paths for arm in results.of_path(path)]


def _mean(values: Values) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def percent(found: Estimate | None, digits: int = 1) -> str:
    """28.1 [26.0, 30.2]; the interval only where there is one."""
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.{digits}f}, {found.high:.{digits}f}]"
    return f"{found.value:.{digits}f}{interval}"


# ── final accuracy ──


def tests(results: Results) -> list[Table]:
    """Each arm against the baseline of its path, paired by seed: a table a path."""
    found = []
    for path in results.paths:
        baseline, *others = results.of_path(path)
        pairs = {arm.name: _pairs(results, arm, baseline) for arm in others}
        compared = [arm for arm in others if len(pairs[arm.name])]
        if not compared:
            continue
        base = results.labels[baseline.name]
        p_values = [statistics.sign_flip_p(_differences(pairs[arm.name])) or 1.0 for arm in compared]
        corrected = statistics.holm(p_values)
        rows = []
        for arm, p, adjusted in zip(compared, p_values, corrected, strict=True):
            ours, theirs = pairs[arm.name][:, 0], pairs[arm.name][:, 1]
            by_seed = _differences(pairs[arm.name])
            change = statistics.mean_interval(by_seed)
            moved = f"{(by_seed > 0).sum()} / {(by_seed == 0).sum()} / {(by_seed < 0).sum()}"
            per_benchmark = (ours - theirs).mean(axis=0)
            rows.append([
                results.labels[arm.name], len(by_seed), f"{ours.mean():.1f}", f"{theirs.mean():.1f}",
                points(change), moved, f"{p:.3f}", f"{adjusted:.3f}", *(signed(value) for value in per_benchmark),
            ])  # fmt: skip
        head = ["arm", "pairs", "its accuracy, %", f"{base}, %", "difference, points", "better / equal / worse"]
        head += ["p", "p, Holm", *(f"{name}, points" for name in results.study.evaluations)]
        most = max(len(pairs[arm.name]) for arm in compared)
        title = (
            f"{PATHS.get(path, path)}: against {base}, paired by seed. {count_of(most, 'pair')} can reach no p below "
            f"{statistics.smallest_p(most):.3g}, and {count_of(len(compared), 'arm')} none below "
            f"{min(1.0, len(compared) * statistics.smallest_p(most)):.3g} after Holm's correction"
        )
        found.append(Table(head, rows, title[0].upper() + title[1:]))
    return found


def _pairs(results: Results, ours: Arm, theirs: Arm) -> np.ndarray:
    """Final accuracies in percent of the seeds that both have, (seeds, 2, benchmarks)."""
    finals = [
        {found.seed: final for found in results.by_arm[arm.name] if (final := results.final(found)) is not None}
        for arm in (ours, theirs)
    ]
    seeds = sorted(finals[0].keys() & finals[1].keys())
    found = [[finals[0][seed], finals[1][seed]] for seed in seeds]
    return 100 * np.array(found).reshape(len(found), 2, len(results.study.evaluations))


def _differences(pairs: np.ndarray) -> np.ndarray:
    """Of the means over the benchmarks, (seeds,); rounded, so that equal accuracies are equal."""
    return np.round(pairs[:, 0].mean(axis=1) - pairs[:, 1].mean(axis=1), 9)


def points(found: Estimate | None) -> str:
    """+1.2 [-0.3, +2.7]"""
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{signed(found.low)}, {signed(found.high)}]"
    return f"{signed(found.value)}{interval}"


def count_of(count: int, what: str) -> str:
    """1 pair, 2 pairs."""
    return f"{count} {what}{'s' if count != 1 else ''}"


def signed(value: float) -> str:
    """One digit after the point, and no minus before a zero."""
    return f"{round(value, 1) + 0.0:+.1f}"


def every_run(results: Results) -> Table:
    """The final evaluation of every run, with each pass@k."""
    names = dict.fromkeys(
        key
        for found in results.runs
        for row in found.evaluations[-1:]
        for key in sorted(row)
        if "_pass" in key and any(key.startswith(f"eval_{name}_pass") for name in results.study.evaluations)
    )
    rows: list[list[Any]] = []
    for arm in _arms(results):
        for found in results.by_arm[arm.name]:
            last = found.evaluations[-1] if found.evaluations else {}
            values = [f"{100 * last[key]:.1f}" if is_number(last.get(key)) else "–" for key in names]
            state = "" if found.finished else "stopped early"
            rows.append([results.labels[arm.name], str(found.seed), str(last.get("step", "–")), *values, state])
    head = ["arm", "seed", "step", *(f"{_words(key)}, %" for key in names), ""]
    return Table(head, rows, f"The last evaluation of each of {len(rows)} runs")


def _words(key: str) -> str:
    """eval_cd34_pass4 as cd34 pass@4."""
    name, _, k = key.removeprefix("eval_").rpartition("_pass")
    return f"{name} pass@{k}"


# ── until an accuracy was reached ──


def targets(results: Results) -> list[Table]:
    """What each arm had spent when it first was as accurate as asked for: a table a target."""
    return [_target(results, target) for target in results.study.targets]


def _target(results: Results, target: float) -> Table:
    rows: list[list[Any]] = []
    for path in results.paths:
        baseline = results.of_path(path)[0]
        base = results.by_seed(baseline.name, "rollouts_to", target)
        for arm in results.of_path(path):
            evaluated = [found for found in results.by_arm[arm.name] if results.accuracy(found)]
            spent = results.by_seed(arm.name, "rollouts_to", target)
            tokens = [_update_tokens_until(results, found, target) for found in evaluated]
            ratios = [spent[seed] / base[seed] for seed in spent if base.get(seed) and spent[seed]]
            ratio = statistics.ratio_interval(ratios) if arm != baseline else None
            rows.append([
                results.labels[arm.name], path, f"{len(spent)} of {len(evaluated)}",
                _median(list(spent.values())), _median(tokens), _times(ratio), ratio.count if ratio else None,
            ])  # fmt: skip
    head = ["arm", "advantages", "seeds that got there", "responses generated, median", "update tokens, median"]
    head += ["responses, ratio to the baseline", "pairs"]
    title = (
        f"Until a held-out accuracy of {target:.1%}: medians over the seeds that got there; the ratio is the geometric "
        "mean over the seeds where both did, with its 95 % interval"
    )
    return Table(head, rows, title)


def _update_tokens_until(results: Results, found: StudyRun, target: float) -> float | None:
    trained = results.until(found, target, "tokens/trained_total")
    return None if trained is None else trained * epochs(found.run)


def _median(values: Values) -> float | None:
    there = [value for value in values if value is not None]
    return round(float(np.median(there))) if there else None


def _times(found: Estimate | None) -> str:
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"× {found.value:.2f}{interval}"


# ── cost, batches, prompts ──


def seconds(results: Results) -> Table:
    """Seconds by phase, the mean over the finished seeds."""
    costs = {arm.name: mean_seconds(results, arm) for arm in _arms(results)}
    names = [name for name in dict.fromkeys([*PHASES, *(name for one in costs.values() for name in one)])
             if any(name in one for one in costs.values())]  # fmt: skip
    rows: list[list[Any]] = []
    for path in results.paths:
        base = sum(costs[results.of_path(path)[0].name].values())
        for arm in results.of_path(path):
            total = sum(costs[arm.name].values())
            times = f"{total:,.0f}" + (f" (× {total / base:.2f})" if base and total else "")
            rows.append([results.labels[arm.name], times, *(_rounded(costs[arm.name].get(name)) for name in names)])
    head = ["arm", "all phases, s", *(f"{PHASES.get(name, name)}, s" for name in names)]
    return Table(
        head, rows, "Seconds of a run by phase, means over the seeds; in brackets the ratio to the path's baseline"
    )


def _rounded(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def sources(results: Results) -> Table:
    """Where the groups that were trained on came from, over whole runs."""
    rows = []
    for arm in _arms(results):
        counts = [run_data.total(results.pooled[arm.name].rows, f"groups/{source}") for source in SOURCES]
        shares = [f"{count:,.0f} ({count / sum(counts):.1%})" if sum(counts) else "–" for count in counts]
        capacity = run_data.total(results.pooled[arm.name].rows, "groups/capacity")
        rows.append([results.labels[arm.name], *shares, f"{sum(counts) / capacity:.0%}" if capacity else "–"])
    head = ["arm", *(LABELS[source] for source in SOURCES), "capacity used"]
    return Table(
        head, rows, "Groups trained on in a run, means over the seeds. In the paper 40 to 60 % are fresh (A.6)"
    )


def unlocked(results: Results) -> Table | None:
    """What became of the prompts that were not solved at first."""
    rows: list[list[Any]] = []
    for arm in _arms(results):
        found = [run_data.unlocked(one.run.groups) for one in results.by_arm[arm.name] if not why_no_bins(one.run)]
        found = [one for one in found if one.at_first]
        if not found:
            continue
        ever, now = (
            statistics.mean_interval([100 * getattr(one, name) / one.at_first for one in found])
            for name in ("ever", "now")
        )
        rows.append(
            [results.labels[arm.name], len(found), _mean([one.at_first for one in found]), percent(ever), percent(now)]
        )
    head = ["arm", "seeds", "prompts not solved at first", "solved by a later group, %", "by the latest group, %"]
    title = (
        "Prompts whose first group had no right response: means over the seeds with 95 % intervals. In the paper, 3 "
        "passes unlocked 31 % with BAPO and 19 % with GRPO. An arm that tries such prompts more often solves more of "
        "them by chance alone"
    )
    return Table(head, rows, title) if rows else None


# ── theory ──


def theory(results: Results) -> Table | None:
    """The bound of Theorem 3.2 and the distances, over whole runs."""
    rows: list[list[Any]] = []
    for arm in _arms(results):
        steps = results.pooled[arm.name].rows
        bounds = [
            value for found in results.by_arm[arm.name] for _, value in run_data.points(found.run.rows, "theory/bound")
        ]
        if not bounds:
            continue
        terms = [_mean([value for _, value in run_data.points(steps, f"theory/bound_{source}")]) for source in SOURCES]
        distances = [_mean([value for _, value in run_data.points(steps, f"tv/{source}")]) for source in SOURCES]
        above = sum(value > 0 for value in bounds) / len(bounds)
        rows.append([results.labels[arm.name], _mean(bounds), f"{above:.1%}", *terms, *distances])
    head = ["arm", "bound", "steps with a bound above 0", *(f"term of {LABELS[source]}" for source in SOURCES)]
    head += [f"TV, {LABELS[source]}" for source in SOURCES]
    return Table(head, rows, "Means over steps and seeds") if rows else None


# ── what was run ──


def arms(results: Results) -> Table:
    """The flags that make each arm."""
    rows = [
        [
            results.labels[arm.name],
            arm.name,
            len(results.by_arm[arm.name]),
            " ".join(map(_flag, arm.flags.items())) or "–",
        ]
        for arm in results.study.arms
    ]
    return Table(["arm", "name", "runs", "flags"], rows, "Arms of the study")


def _flag(item: tuple[str, Any]) -> str:
    name, value = item
    words = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"--{name} {words}"


def flags(results: Results) -> Table | None:
    """Flags whose values are not the same in the arms, by each arm's first run; those of the machine included."""
    known = [results.pooled[arm.name] for arm in _arms(results) if results.pooled[arm.name].config]
    return different_flags(known) if len(known) > 1 else None


def provenance(about: Mapping[str, Any]) -> Table | None:
    """What made the study."""
    rows: list[list[Any]] = []
    for name, value in about.items():
        if isinstance(value, Mapping):
            rows += [[f"{name}: {part}", _text(content)] for part, content in value.items()]
        else:
            rows.append([name, _text(value)])
    return Table(["", "value"], rows) if rows else None


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else number(value) if is_number(value) else json.dumps(value, default=str)

"""The numbers of each figure and table, from a run's record. Pure: no file is read and nothing is drawn."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from bapo_openrlhf.record.run_record import REWARD, SOURCES
from bapo_openrlhf.workbench.evaluation.estimators import LEVEL, resampled_means
from bapo_openrlhf.workbench.plot import smooth
from bapo_openrlhf.workbench.report.runs import Row, Run, is_number

Point = tuple[float, float]

# What can become of a generated group, with the words of the page; the order is that of the tables.
STATES = {
    "fresh": "trained on: fresh (X1)",
    "reevaluated": "trained on: re-evaluated (X2)",
    "none_right": "filtered: no response was right",
    "all_right": "filtered: every response was right",
    "by_draw": "filtered: by the filter's draw",
    "filtered": "filtered: reason not recorded",
    "unimproved": "re-evaluated, still too hard",
    "solved": "re-evaluated, nothing left to learn from",
    "cut": "selected, but there was no room",
    "too_far": "selected, but too far from today's policy",
    "nonfinite": "selected, but log-probs were no finite numbers",
    "failed": "failed: no reward, or no finite log-probs",
}
REASONS = ("none_right", "all_right", "by_draw")  # why the filter dropped a group
MAX_PASSES = 12
RESAMPLES = 1000


# ── curves ──


def points(rows: Iterable[Row], key: str) -> list[Point]:
    """(step, value) of each row that has a finite number there."""
    return [(row["step"], float(row[key])) for row in rows if is_number(row.get(key))]


def bin_width(last_step: int, most: int) -> int:
    """How many steps one drawn point stands for, so that `most` suffice."""
    return max(1, math.ceil(last_step / most))


def binned(curve: Iterable[Point], width: int, *, peaks: bool = False) -> list[Point]:
    """One point for steps 1..width, one for width + 1..2 width, and so on; x is the middle of each.

    y is the mean of what is there, or with `peaks` the largest. A bin without a point is left out.
    """
    if width == 1:
        return list(curve)
    bins: dict[int, list[float]] = defaultdict(list)
    for step, value in curve:
        bins[int(step - 1) // width].append(value)
    values = {number: max(found) if peaks else sum(found) / len(found) for number, found in bins.items()}
    return [(number * width + (width + 1) / 2, values[number]) for number in sorted(values)]


def smoothing_width(count: int) -> int:
    """Points that the moving average of `count` points takes: a tenth of them, at least 3, an odd number."""
    return max(3, count // 10) | 1


def smoothed(curve: Sequence[Point]) -> list[Point]:
    """Centred moving average of a curve's values; see `smoothing_width`."""
    values = smooth([value for _, value in curve], smoothing_width(len(curve)))
    return [(x, value) for (x, _), value in zip(curve, values, strict=True)]


def against(rows: Iterable[Row], key_x: str, key_y: str) -> list[Point]:
    """(x, y) of the rows that have both."""
    return [
        (float(row[key_x]), float(row[key_y]))
        for row in rows
        if is_number(row.get(key_x)) and is_number(row.get(key_y))
    ]


def spending(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows with "hours", what all steps so far took; None from the first step on whose time is not recorded."""
    hours: float | None = 0.0
    result = []
    for row in rows:
        seconds = row.get("timing/step_total")
        hours = hours + seconds / 3600 if hours is not None and is_number(seconds) else None  # type: ignore[operator]
        result.append({**row, "hours": hours})
    return result


def chunk_means(curve: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: each the mean, in x and y, of as many consecutive ones."""
    size = max(1, math.ceil(len(curve) / most))
    chunks = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def stacked_heights(curves: Sequence[Sequence[Point]]) -> list[float]:
    """The sum of the curves at each x that one of them has."""
    heights: dict[float, float] = defaultdict(float)
    for curve in curves:
        for x, value in curve:
            heights[x] += value
    return list(heights.values())


# ── what became of the groups ──


def outcomes(run: Run) -> dict[str, int]:
    """How many generated groups ended in each of STATES; those that never occurred are left out.

    From the metrics. Why the filter dropped a group is in filtered/*, in older runs only in groups.jsonl, else unknown.
    """
    counts = {state: total(run.rows, f"groups/{state}") for state in STATES if state not in REASONS}
    reasons = {reason: total(run.rows, f"filtered/{reason}") for reason in REASONS}
    if not sum(reasons.values()):
        reasons |= Counter(filter_reason(group["mean"]) for group in run.groups if group["state"] == "filtered")
    counts |= reasons
    counts["filtered"] = max(0, counts["filtered"] - sum(reasons.values()))
    return {state: round(counts[state]) for state in STATES if counts[state]}


def filter_reason(mean: float | None) -> str:
    """Why a fresh group with rewards of 0 and 1 was dropped."""
    return {0: "none_right", 1: "all_right"}.get(mean, "by_draw")  # type: ignore[arg-type]


def total(rows: Iterable[Row], key: str) -> float:
    """Sum of a metric over the rows that have it."""
    return sum(value for _, value in points(rows, key))


# ── accuracy of the prompts ──


def group_size(groups: Iterable[Row]) -> int:
    """G: the most frequent number of responses."""
    return Counter(group["responses"] for group in groups).most_common(1)[0][0]


def accuracy_bin(mean: float, size: int) -> int:
    """The bin 0..G whose k/G is nearest to a group mean reward."""
    return math.floor(mean * size + 0.5)


def rewards_fit_bins(groups: Iterable[Row]) -> bool:
    """Whether all means are in [0, 1], as bins 0/G..G/G need."""
    return all(0 <= group["mean"] <= 1 for group in groups if group["mean"] is not None)


@dataclass(frozen=True)
class Passes:
    """How many prompts were in each accuracy bin, at several points of a run (Fig. 7, 13).

    Attributes:
        size: G; the bins are 0..G.
        names: of the points: "first", then the number of passes until then.
        counts: (points, G + 1), each prompt by its latest group until then, at "first" by its first.
    """

    size: int
    names: list[str]
    counts: list[list[int]]


def passes(groups: Sequence[Row]) -> Passes:
    """Accuracy bins at first sight and after each pass through the data.

    A pass is as many fresh groups as there are different prompts; it ends with the step that reaches them. Groups
    without a mean reward count for the pass, not for the bins. Of many passes, MAX_PASSES evenly spaced ones are given.

    Args:
        groups: as in groups.jsonl, in the order of the file; at least one with a mean.
    """
    size = group_size(groups)
    prompts = len({group["prompt"] for group in groups if group["source"] == "fresh"})
    first, latest = [0] * (size + 1), [0] * (size + 1)
    bins: dict[str, int] = {}
    points_: list[tuple[str, list[int]]] = []
    seen = ended = 0
    for number, group in enumerate(groups):
        seen += group["source"] == "fresh"
        if group["mean"] is not None:
            found = accuracy_bin(group["mean"], size)
            if group["prompt"] in bins:
                latest[bins[group["prompt"]]] -= 1
            else:
                first[found] += 1
            bins[group["prompt"]] = found
            latest[found] += 1
        last = number + 1 == len(groups)
        if last or groups[number + 1]["step"] != group["step"]:
            if prompts and seen // prompts > ended:
                ended = seen // prompts
                points_.append((str(ended), list(latest)))
            elif last:
                points_.append((f"{seen / prompts:.1f}" if prompts else "end", list(latest)))
    kept = evenly(len(points_), MAX_PASSES)
    chosen = [points_[index] for index in kept]
    return Passes(size, ["first", *(name for name, _ in chosen)], [first, *(counts for _, counts in chosen)])


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0..count - 1, evenly spaced, the last one included."""
    if count <= most:
        return list(range(count))
    return sorted({round((number + 1) * count / most) - 1 for number in range(most)})


@dataclass(frozen=True)
class Migration:
    """Where prompts came from and where they are (Fig. 15).

    Attributes:
        step: until which groups count.
        counts: (G + 1, G + 1), [bin of the first group][bin of the latest] of each prompt with at least two.
    """

    step: int
    counts: list[list[int]]

    @property
    def moved(self) -> tuple[int, int, int]:
        """How many prompts are worse, the same, better than at first."""
        cells = [(column - row, count) for row, line in enumerate(self.counts) for column, count in enumerate(line)]
        return (
            sum(count for by, count in cells if by < 0),
            sum(count for by, count in cells if by == 0),
            sum(count for by, count in cells if by > 0),
        )


def migrations(groups: Sequence[Row], at: Sequence[int]) -> list[Migration]:
    """The migration matrix after each of the steps `at` (ascending)."""
    size = group_size(groups)
    usable = [group for group in groups if group["mean"] is not None]
    first: dict[str, int] = {}
    latest: dict[str, int] = {}
    result, place = [], 0
    for step in at:
        while place < len(usable) and usable[place]["step"] <= step:
            group = usable[place]
            place += 1
            found = accuracy_bin(group["mean"], size)
            if group["prompt"] in first:
                latest[group["prompt"]] = found
            else:
                first[group["prompt"]] = found
        counts = [[0] * (size + 1) for _ in range(size + 1)]
        for prompt, now in latest.items():
            counts[first[prompt]][now] += 1
        result.append(Migration(step, counts))
    return result


def thirds(last_step: int) -> list[int]:
    """After a third, two thirds and all of the steps; fewer where those are the same."""
    return sorted({max(1, round(last_step * part / 3)) for part in (1, 2, 3)})


@dataclass(frozen=True)
class Unlocked:
    """Prompts whose first group had no right response.

    Attributes:
        at_first: how many there are.
        ever, now: of these, with a mean above 0 in a later group, in the latest group.
    """

    at_first: int
    ever: int
    now: int


def unlocked(groups: Iterable[Row]) -> Unlocked:
    """What became of the prompts that were not solved at first (Fig. 7: 31 % of them under BAPO, 19 % under GRPO)."""
    means = means_by_prompt(groups)
    hard = [series for series in means.values() if series[0] == 0]
    return Unlocked(len(hard), sum(max(series) > 0 for series in hard), sum(series[-1] > 0 for series in hard))


def means_by_prompt(groups: Iterable[Row]) -> dict[str, list[float]]:
    """The group means of each prompt, oldest first; groups without one are left out."""
    means: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        if group["mean"] is not None:
            means[group["prompt"]].append(group["mean"])
    return dict(means)


@dataclass(frozen=True)
class Paired:
    """Run B compared with run A, prompt by prompt, over the prompts that both generated groups for.

    Attributes:
        prompts: how many these are.
        mean_a, mean_b: average of the latest group means.
        low, high: 95 % bootstrap interval of mean_b - mean_a over prompts.
        better, equal, worse: prompts whose latest group mean is above, as, below that of A.
        only_a, only_b: prompts that this run alone ever solved (a group with mean above 0).
    """

    prompts: int
    mean_a: float
    mean_b: float
    low: float
    high: float
    better: int
    equal: int
    worse: int
    only_a: int
    only_b: int


def paired(groups_a: Iterable[Row], groups_b: Iterable[Row]) -> Paired | None:
    """None where the runs share no prompt."""
    a, b = means_by_prompt(groups_a), means_by_prompt(groups_b)
    shared = sorted(a.keys() & b.keys())
    if not shared:
        return None
    latest_a, latest_b = (np.array([means[prompt][-1] for prompt in shared]) for means in (a, b))
    ever_a, ever_b = (np.array([max(means[prompt]) > 0 for prompt in shared]) for means in (a, b))
    change = latest_b - latest_a
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled_means(change, seed=0, resamples=RESAMPLES), [tail, 100 - tail])
    return Paired(
        prompts=len(shared),
        mean_a=float(latest_a.mean()),
        mean_b=float(latest_b.mean()),
        low=float(low),
        high=float(high),
        better=int((change > 0).sum()),
        equal=int((change == 0).sum()),
        worse=int((change < 0).sum()),
        only_a=int((ever_a & ~ever_b).sum()),
        only_b=int((ever_b & ~ever_a).sum()),
    )


# ── cost ──


@dataclass(frozen=True)
class Cost:
    """What a run spent; None where its record does not say.

    Attributes:
        seconds: by phase, without the total.
        total_seconds: of the steps' phases.
        whole_run: seconds of the last start, loading included.
    """

    steps: int
    trained_groups: int
    rollouts: float | None
    tokens_generated: float | None
    tokens_trained: float | None
    seconds: dict[str, float]
    total_seconds: float | None
    whole_run: float | None


def cost(run: Run) -> Cost:
    """From the metrics (Table 2 and Fig. 9)."""

    def last(key: str) -> float | None:
        found = points(run.rows, key)
        return found[-1][1] if found else None

    phases = dict.fromkeys(key for row in run.rows for key in row if key.startswith("timing/"))
    seconds = {key.removeprefix("timing/"): total(run.rows, key) for key in phases}
    whole = (run.summary.get("seconds") or {}).get("whole_run")
    return Cost(
        steps=len(run.rows),
        trained_groups=round(sum(total(run.rows, f"groups/{source}") for source in SOURCES)),
        rollouts=last("rollouts/total"),
        tokens_generated=last("tokens/generated_total"),
        tokens_trained=last("tokens/trained_total"),
        total_seconds=seconds.pop("step_total", None),
        seconds=seconds,
        whole_run=whole if is_number(whole) else None,
    )


def spent_until(rows: Sequence[Row], key: str, reward: float) -> float | None:
    """What `key` of `spending` had come to when the smoothed reward first reached `reward`; None where it never did."""
    curve = against(spending(rows), key, REWARD)
    for (spent, _), (_, reached) in zip(curve, smoothed(curve), strict=True):
        if reached >= reward:
            return spent
    return None


def best_smoothed(rows: Sequence[Row]) -> float | None:
    """The highest smoothed reward of a run; None where it has no reward."""
    curve = points(rows, REWARD)
    return max(value for _, value in smoothed(curve)) if curve else None


# ── the conditions of Theorem 3.2 ──


@dataclass(frozen=True)
class Condition:
    """One condition of Theorem 3.2 (or of what the monitor takes for granted), and whether it held.

    Attributes:
        what: the condition, a sentence.
        held: None where that is not known or was not asked for.
        note: why it did not hold, or is not known, or what was seen.
        steps: where it did not hold.
    """

    what: str
    held: bool | None
    note: str = ""
    steps: Sequence[int] = ()


def conditions(run: Run) -> list[Condition]:
    """Theorem 3.2's conditions at each step of a run; empty where its record has no constants K1..K3."""
    if not any(f"theory/k{number}" in row for row in run.rows for number in (1, 2, 3)):
        return []
    return [
        _rewards(run),
        _c1(run),
        _thresholds(run),
        _distance(run, "fresh", "X1", "the delayed rollout policy", "max_tv_fresh", "Eq. 9, delta_1"),
        _distance(run, "replayed", "X3", "the policies of the replay buffer", "max_tv_replayed", "Eq. 10, delta_3"),
        _today(run),
        _constants(run),
        _k1_applies(run),
        _k2_applies(run),
    ]


def _rewards(run: Run) -> Condition:
    if run.groups:
        means = [(group["step"], group["mean"]) for group in run.groups if group["mean"] is not None]
        note = "judged by the group means; single rewards are not recorded"
    else:
        means, note = points(run.rows, REWARD), "judged by the mean over each step's fresh responses"
    wrong = sorted({int(step) for step, mean in means if not 0 <= mean <= 1})
    return Condition("Rewards are between 0 and 1.", not wrong if means else None, note, wrong)


def c1_of(config: Mapping[str, Any]) -> Fraction | None:
    """c1 of a run, from its flags; None where they are not recorded."""
    if config.get("adapt.method") == "bapo_mini_test":
        return Fraction(0)
    try:
        return Fraction(str(config["adapt.c1"]))
    except (KeyError, ValueError):
        return None


def _c1(run: Run) -> Condition:
    c1, what = c1_of(run.config), "c1 is above 0 and below 1."
    if c1 is None:
        return Condition(what, None, "the run's flags are not recorded")
    return _always(run, what, 0 < c1 < 1, f"c1 = {c1}")


def _thresholds(run: Run) -> Condition:
    what = "c2 and c3 are above 0 and below 1, and c2 is below c3."
    known = [(row["step"], row["threshold/c2"], row["threshold/c3"]) for row in run.rows if _thresholds_in(row)]
    wrong = [step for step, c2, c3 in known if not 0 < c2 < c3 < 1]
    return Condition(what, not wrong if known else None, "" if known else "c2 and c3 are not recorded", wrong)


def _thresholds_in(row: Row) -> bool:
    return is_number(row.get("threshold/c2")) and is_number(row.get("threshold/c3"))


def _distance(run: Run, source: str, symbol: str, policy: str, flag: str, equation: str) -> Condition:
    what = f"Today's policy is close to {policy} on {symbol} ({equation})."
    seen = points(run.rows, f"tv/{source}")
    if not seen:
        return Condition(what, None, f"no step trained on {symbol}")
    step, most = max(seen, key=lambda point: point[1])
    largest = f"the largest mean distance of a step is {most:.3g}, at step {step:g}"
    limit = run.config.get(f"adapt.{flag}")
    if not is_number(limit):
        return Condition(what, None, f"no limit was set (--adapt.{flag}); {largest}")
    wrong = [int(step) for step, value in seen if value > limit]
    return Condition(what, not wrong, f"the limit is {limit:g}; {largest}", wrong)


def _today(run: Run) -> Condition:
    what = "X2 was generated by today's policy."
    seen = points(run.rows, "tv/reevaluated")
    if not seen:
        return Condition(what, None, "no step trained on X2")
    most = max(value for _, value in seen)
    return Condition(what, True, f"by construction; engine and actor differ by a mean distance of at most {most:.3g}")


def _constants(run: Run) -> Condition:
    # A null is an infinity or no number at all: JSON has neither.
    wrong = [
        row["step"]
        for row in run.rows
        if any(
            f"theory/k{number}" in row and not (is_number(row[f"theory/k{number}"]) and row[f"theory/k{number}"] > 0)
            for number in (1, 2, 3)
        )
    ]
    return Condition("The variances stay away from 0: K1, K2 and K3 are finite and positive.", not wrong, "", wrong)


def _k1_applies(run: Run) -> Condition:
    what, chosen = "X1 passed the range filter, which K1 is made for.", run.config.get("adapt.filter")
    if chosen is None:
        return Condition(what, None, "the run's flags are not recorded")
    return _always(run, what, chosen == "range", f"--adapt.filter {chosen}")


def _k2_applies(run: Run) -> Condition:
    what, c1 = "c1 is at most 1/G, so that K2 bounds X2.", c1_of(run.config)
    if c1 is None or not run.groups:
        return Condition(what, None, "c1 or the group size is not recorded")
    size = group_size(run.groups)
    return _always(run, what, c1 <= Fraction(1, size), f"c1 = {c1}, G = {size}")


def _always(run: Run, what: str, held: bool, note: str) -> Condition:
    """A condition that is the same at every step."""
    return Condition(what, held, note, () if held else [row["step"] for row in run.rows])


def step_ranges(steps: Iterable[int], most: int = 8) -> str:
    """3, 4, 5, 9 as "3–5, 9"; beyond `most` ranges the number of the other steps."""
    ranges: list[list[int]] = []
    for step in sorted(set(steps)):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    text = ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in ranges[:most])
    rest = sum(high - low + 1 for low, high in ranges[most:])
    return text + (f" and {rest:,} more" if rest else "")


# ── prompts and answers ──


@dataclass(frozen=True)
class Tried:
    """A prompt that failed, with its answers.

    Attributes:
        text, label: of the prompt.
        failed: row of answers.jsonl of its first failure.
        solved: of its first success after that; None where there was none.
        groups: how many groups were generated for it; None where groups.jsonl is missing.
    """

    text: str
    label: str
    failed: Row
    solved: Row | None
    groups: int | None


def newly_solved(run: Run) -> list[Tried]:
    """Prompts that failed and were solved after that, the newest success first."""
    failed, solved, means = _answers(run)
    found = [_tried(failed[prompt], solved[prompt], means) for prompt in solved if prompt in failed]
    return sorted(found, key=lambda tried: -tried.solved["step"])  # type: ignore[index]


def never_solved(run: Run) -> list[Tried]:
    """Prompts that failed and have no group with a mean above 0 at all, the most often tried first."""
    failed, solved, means = _answers(run)
    found = [
        _tried(row, None, means)
        for prompt, row in failed.items()
        if prompt not in solved and max(means.get(prompt, [0])) <= 0
    ]
    return sorted(found, key=lambda tried: (-(tried.groups or 0), tried.failed["step"]))


def telling_parts(texts: Sequence[str]) -> list[str]:
    """Each text without what all begin and end with, a template: what tells one from the others. As it is if alone."""
    if len(set(texts)) < 2:
        return list(texts)
    start = len(os.path.commonprefix(list(texts)))  # noqa: RUF071 - character by character is meant
    rests = [text[start:] for text in texts]
    end = len(os.path.commonprefix([rest[::-1] for rest in rests]))  # noqa: RUF071
    return [rest[: len(rest) - end] for rest in rests]


def _answers(run: Run) -> tuple[dict[str, Row], dict[str, Row], dict[str, list[float]]]:
    by_kind: dict[str, dict[str, Row]] = {"failed": {}, "solved": {}}
    for row in run.answers:
        by_kind[row["kind"]].setdefault(row["prompt"], row)
    return by_kind["failed"], by_kind["solved"], means_by_prompt(run.groups)


def _tried(failed: Row, solved: Row | None, means: Mapping[str, Sequence[float]]) -> Tried:
    count = len(means[failed["prompt"]]) if failed["prompt"] in means else None
    return Tried(str(failed["text"]), str(failed["label"]), failed, solved, count)


# ── configuration ──


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names whose values are not the same in all runs, one that a run lacks included; sorted."""
    names = sorted({name for run in runs for name in run})
    return [name for name in names if any(run.get(name) != runs[0].get(name) or name not in run for run in runs)]

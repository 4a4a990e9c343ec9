"""The numbers of a study, from its runs. Pure: no file is read and nothing is drawn."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bapo_openrlhf.workbench.report import data
from bapo_openrlhf.workbench.report.data import Point
from bapo_openrlhf.workbench.report.runs import Row, Run, is_number
from bapo_openrlhf.workbench.study.definition import Arm, Study

PLAIN = "plain"  # the method that the others of a path are compared with
PATHS = {"group": "group-relative advantages", "critic": "critic (GAE)"}


@dataclass(frozen=True)
class StudyRun:
    """One seed of an arm.

    Attributes:
        evaluations: rows of held-out accuracy during training, the final one last: "step" and eval_<benchmark>_pass<k>.
    """

    arm: Arm
    seed: int
    run: Run
    evaluations: Sequence[Mapping[str, Any]] = ()

    @property
    def finished(self) -> bool:
        """Whether all steps are there; what an interrupted run had reached is no final accuracy."""
        planned = self.run.about.get("total_steps")
        return bool(self.run.summary) or not is_number(planned) or self.run.last_step >= planned


@dataclass(frozen=True)
class Results:
    """A study with the runs that are there."""

    study: Study
    runs: Sequence[StudyRun]

    def __post_init__(self) -> None:
        seen = Counter((found.arm.name, found.seed) for found in self.runs)
        if twice := [key for key, count in seen.items() if count > 1]:
            raise ValueError(f"runs given more than once (arm, seed): {twice}")

    @cached_property
    def labels(self) -> dict[str, str]:
        """What the page calls each arm, by its name: its label, with the path where two have the same."""
        often = Counter(arm.label for arm in self.study.arms)
        on_path = Counter((arm.label, arm.path) for arm in self.study.arms)
        return {
            arm.name: arm.label
            if often[arm.label] == 1
            else f"{arm.label} ({arm.path if on_path[arm.label, arm.path] == 1 else arm.name})"
            for arm in self.study.arms
        }

    @cached_property
    def by_arm(self) -> dict[str, list[StudyRun]]:
        """The runs of each arm of the study, in the order of the seeds; empty lists for arms without any."""
        result: dict[str, list[StudyRun]] = {arm.name: [] for arm in self.study.arms}
        for found in sorted(self.runs, key=lambda found: found.seed):
            result[found.arm.name].append(found)
        return result

    @cached_property
    def arms(self) -> list[Arm]:
        """The arms that have a run."""
        return [arm for arm in self.study.arms if self.by_arm[arm.name]]

    @property
    def paths(self) -> list[str]:
        """The advantage paths of these arms."""
        return list(dict.fromkeys(arm.path for arm in self.arms))

    def of_path(self, path: str) -> list[Arm]:
        """The arms of a path that have a run, its baseline first: the plain method, or else the first arm."""
        arms = [arm for arm in self.arms if arm.path == path]
        return sorted(arms, key=lambda arm: arm.method != PLAIN)

    @cached_property
    def pooled(self) -> dict[str, Run]:
        """For each arm with a run, all its seeds as one: see `pool`."""
        return {arm.name: pool(self.labels[arm.name], self.by_arm[arm.name]) for arm in self.arms}

    @cached_property
    def costs(self) -> dict[tuple[str, int], data.Cost]:
        """What each run spent, by arm and seed."""
        return {(found.arm.name, found.seed): data.cost(found.run) for found in self.runs}

    def cost(self, found: StudyRun) -> data.Cost:
        """What a run spent."""
        return self.costs[found.arm.name, found.seed]

    def update_tokens(self, found: StudyRun) -> float | None:
        """Tokens that the actor's updates went over: those of the batches, as often as each was trained on."""
        trained = self.cost(found).tokens_trained
        return None if trained is None else trained * epochs(found.run)

    # ── final accuracy ──

    def final(self, found: StudyRun) -> list[float] | None:
        """Final accuracy (pass@1) on each benchmark; None where the run has not ended or one is not there."""
        if not found.finished or not found.evaluations:
            return None
        values = [found.evaluations[-1].get(f"eval_{name}_pass1") for name in self.study.evaluations]
        return [float(value) for value in values] if values and all(map(is_number, values)) else None  # type: ignore[arg-type]

    def scores(self, arm: Arm) -> np.ndarray:
        """Final accuracies of the seeds that have them, (runs, benchmarks)."""
        values = [self.final(found) for found in self.by_arm[arm.name]]
        there = [value for value in values if value is not None]
        return np.array(there).reshape(len(there), len(self.study.evaluations))

    # ── one number a run ──

    def measure(self, name: str, found: StudyRun, target: float | None = None) -> float | None:
        """What a claim compares.

        Args:
            name: accuracy, the mean over the benchmarks; rollouts; solved; rollouts_to, with a target.
        """
        if name == "accuracy":
            values = self.final(found)
            return None if values is None else float(np.mean(values))
        if name == "rollouts":
            return self.cost(found).rollouts if found.finished else None
        if name == "solved":
            return unlocked_share(found.run) if found.finished else None
        if name == "rollouts_to" and target is not None:
            return self.until(found, target, "rollouts/total")
        raise ValueError(f"measure is {name!r}; it may be accuracy, rollouts, solved or rollouts_to")

    def by_seed(self, arm: str, name: str, target: float | None = None) -> dict[int, float]:
        """A measure of the seeds of an arm that have it."""
        values = {found.seed: self.measure(name, found, target) for found in self.by_arm[arm]}
        return {seed: value for seed, value in values.items() if value is not None}

    # ── accuracy over the run ──

    def accuracy(self, found: StudyRun) -> list[Point]:
        """(step, mean held-out accuracy over the benchmarks) of each evaluation that has them all."""
        keys = [f"eval_{name}_pass1" for name in self.study.evaluations]
        return [
            (float(row["step"]), float(np.mean([row[key] for key in keys])))
            for row in found.evaluations
            if keys and all(is_number(row.get(key)) for key in keys)
        ]

    def until(self, found: StudyRun, target: float, metric: str) -> float | None:
        """What a running total had come to at the first evaluation at or above the target; None if it never was."""
        arrived = [point for point in self.accuracy(found) if point[1] >= target][:1]
        spent = over(found.run, arrived, metric)
        return spent[0][0] if spent else None


def over(run: Run, curve: Sequence[Point], metric: str) -> list[Point]:
    """A curve over the steps as one over a running total, which is 0 before the first step.

    A point whose step is before the first record of the total is left out.
    """
    known = data.points(run.rows, metric)
    result = []
    for step, value in curve:
        place = bisect_right(known, step, key=lambda point: point[0])
        if place or step <= 0:
            result.append((known[place - 1][1] if place else 0.0, value))
    return result


def epochs(run: Run) -> float:
    """How often each batch is trained on; 1 where the flags do not say."""
    found = run.config.get("train.max_epochs")
    return float(found) if is_number(found) else 1.0  # type: ignore[arg-type]


def unlocked_share(run: Run) -> float | None:
    """Of the prompts whose first group had no right response, the share that a later group solved; None without any."""
    if not run.groups:
        return None
    found = data.unlocked(run.groups)
    return found.ever / found.at_first if found.at_first else None


# ── seeds together ──


def pool(name: str, runs: Sequence[StudyRun]) -> Run:
    """The seeds of an arm as one run: metrics are means over the seeds that have them, groups are those of all.

    A prompt of one seed is another one than that of the next seed: each counts.
    """
    rows: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    groups: list[Row] = []
    for found in runs:
        for row in found.run.rows:
            for key, value in row.items():
                if is_number(value):
                    rows[row["step"]][key].append(value)
        groups += [{**group, "prompt": f"{found.seed} {group['prompt']}"} for group in found.run.groups]
    means = [
        {**{key: sum(values) / len(values) for key, values in rows[step].items()}, "step": step}
        for step in sorted(rows)
    ]
    groups.sort(key=lambda group: group["step"])  # stable: each seed's order stays
    return Run(name, means, runs[0].run.about, groups)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the seeds at one place."""

    x: float
    median: float
    low: float
    high: float


def band(curves: Sequence[Sequence[Point]], places: Sequence[float]) -> list[Spread]:
    """Median and quartiles of curves at the places where at least half of them are known.

    Between its points a curve is a straight line; before its first and after its last it is not known.
    """
    drawn = [np.asarray(curve, dtype=float) for curve in curves if curve]
    result = []
    for x in places:
        values = [np.interp(x, curve[:, 0], curve[:, 1]) for curve in drawn if curve[0, 0] <= x <= curve[-1, 0]]
        if values and 2 * len(values) >= len(drawn):
            low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
            result.append(Spread(float(x), float(median), float(low), float(high)))
    return result


# ── what is not there ──


def missing(results: Results) -> list[str]:
    """Sentences on runs and evaluations that are not there, or not whole."""
    sentences = []
    for arm in results.study.arms:
        name, runs = results.labels[arm.name], results.by_arm[arm.name]
        absent = [seed for seed in results.study.seeds if seed not in {found.seed for found in runs}]
        if absent:
            sentences.append(f"{name}: no run of seed {_listed(absent)}.")
        halfway = [found for found in runs if not found.finished]
        for found in halfway:
            sentences.append(
                f"{name}, seed {found.seed}: stopped at step {found.run.last_step:,} of "
                f"{found.run.about['total_steps']:,}; in the curves until there, not in the final numbers."
            )
        unjudged = [found.seed for found in runs if found.finished and results.final(found) is None]
        if unjudged:
            sentences.append(f"{name}: no final accuracy of seed {_listed(unjudged)}.")
    return sentences


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))

"""The stages of decision_design.md: which runs there are, with which learning rates, and how long they take.

A stage is a study of research/studies with seeds of its own. A *search* finds the best learning rate of some methods. A
stage that has `rates_from` gives each arm the rate that this search has found, and one whose flags have a rate gives it
to all. A *climb* finds settings in which the critic explains something, and a stage that has `settings_from` takes
them. Stages are run in the order of STAGES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from critic_stages import CRITIC
from fair_stages import FAIR
from folders import RESULTS, STUDIES
from replay_map import priced
from reuse_stages import REUSE
from stage import RATE, REST, Stage, resized

from bapo_openrlhf.errors import RunError
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.report.runs import read_run
from bapo_openrlhf.workbench.study.data import ROLLOUTS, Results, StudyRun
from bapo_openrlhf.workbench.study.definition import Arm, Study, read_study
from bapo_openrlhf.workbench.study.runner import Planned, plan

ONE_RATE = 1e-4  # the learning rate of all searched arms but GRPO and BAPO, which have it in the stage `one_rate`
FACTOR = 2  # between two rates of a search
MOST_MORE = 2  # rates that a search adds at each end, if the best one is there
NEAR = 0.03  # of two rates whose heights differ by less, the smaller one is taken
EXPLAINED = "value/explained_variance"
ENOUGH = 0.2  # share of the variance of the returns: nothing is claimed about a critic that explains less
SIZES = range(16, 65, 4)  # of `train.batch_size` for a method that makes as many optimizer steps as another one
FAILED = "failed"  # file in the folder of a run that has ended twice with an error
HEIGHTS = RESULTS / "decision" / "heights.csv"  # what searches have found whose runs are gone
AVX2 = 1.8  # times as long as with AMX: a step of the quickstart takes 1.4 to 1.8 times as long (docs/performance.md)


class NotYet(Exception):
    """A search or a climb has not ended, and what was asked for depends on it."""


# Which search an arm has its rate from: the nearest of the methods that were searched (decision_design.md).
NEAREST = {
    "replay_all_two_steps": "two_epochs",
    "in_denominator": "plain",
    "filter_only_delayed": "filter_only",
    "bapo_c1_0": "bapo",
    "bapo_asks_eighths": "bapo",
    "bapo_in_place": "bapo",
    "replay_all_8": "bapo",
    "ar3po": "plain",
    "luffy": "plain",
    "relift": "plain",
}  # fmt: skip


# Seconds of a run of 4,096 responses that has the machine for itself. The steps take 0.86 of the time that they took
# beside another run (research/results/map: GRPO's unit times, 146 s of 169 s). Everything else took REST at the least.
# Those of GRPO, also with half of the prompts, are of the first runs of this study.
SECONDS = {
    "plain": 164.0, "half": 225.0, "two_epochs": 264.0, "filter_only": 190.0, "bapo": 199.0, "replay_all": 289.0,
    "replay_all_two_steps": 284.0, "without_x2": 197.0, "in_denominator": 164.0, "filter_only_delayed": 190.0,
}  # fmt: skip
SEARCHED = ("plain", "half", "two_epochs", "filter_only", "bapo", "replay_all", "without_x2")
OF_HARD = {"plain": 180.0, "half": 205.0, "filter_only": 170.0, "bapo": 180.0, "without_x2": 175.0, "bapo_c1_0": 180.0}
MORE_OF_HARD = {"bapo_asks_eighths": 180.0, "bapo_in_place": 180.0, "replay_all_8": 260.0, "ar3po": 160.0,
                "luffy": 180.0, "relift": 180.0}  # fmt: skip
OF_CRITIC = {"plain": 340.0, "filter_only": 320.0, "two_epochs": 460.0, "without_x2": 330.0}
CLIMB = (("fast", "faster"), ("passes_4", "passes_16"), ("partial",), ("longer", "longer_partial"))
COUNTED = 25.0  # seconds in which the problems are counted that a model solves
TIMED_STEPS = 20  # of a run that measures unit times
TIMED = {method: seconds for method, seconds in SECONDS.items() if method != "in_denominator"}  # it has filter only's

STAGES = (
    Stage("rates", 1, "best_rates", (201, 202), {method: SECONDS[method] for method in SEARCHED},
          grid=(5e-5, 1e-4, 2e-4, 4e-4)),
    Stage("units", 1, "best_rates", (301, 302, 303), resized(TIMED, TIMED_STEPS / 64, 25.0), rates_from="rates",
          flags={"data.max_samples": 8 * TIMED_STEPS, "eval.steps": -1}),
    Stage("runs", 1, "best_rates", tuple(range(61, 71)), SECONDS, rates_from="rates"),
    Stage("one_rate", 1, "best_rates", tuple(range(61, 71)), {m: SECONDS[m] for m in ("plain", "bapo")},
          flags={RATE: ONE_RATE}, beside="runs"),
    Stage("hard_rates", 2, "hard_prompts", (203, 204), resized({m: OF_HARD[m] for m in ("plain", "bapo")}, 0.75, REST),
          grid=(5e-5, 1e-4, 2e-4)),
    Stage("hard", 2, "hard_prompts", tuple(range(71, 81)), resized(OF_HARD, 0.75, REST + COUNTED),
          rates_from="hard_rates", solved=True),
    Stage("hard_more", 2, "hard_prompts_more", (71, 72, 73), resized(MORE_OF_HARD, 0.75, REST + COUNTED),
          rates_from="hard_rates", solved=True, beside="hard"),
    Stage("critic_search", 3, "critic_search", (205,), {method: 340.0 for step in CLIMB for method in step},
          rates_from="rates", climb=CLIMB),
    Stage("critic", 3, "critic", tuple(range(81, 91)), OF_CRITIC, rates_from="rates", settings_from="critic_search"),
    Stage("age", 4, "age_or_distance", (91, 92), {"small": 780.0, "large": 780.0}),
)  # fmt: skip
_chosen: dict[tuple[str, Path], dict[str, float]] = {}  # what the searches that have ended found, by their folder
# With hard prompts, the rates of two methods are searched.
HARD_NEAREST = {"half": "plain", "filter_only": "bapo", "without_x2": "bapo"}


@cache
def definition(name: str) -> Study:
    """A study of research/studies."""
    return read_study(STUDIES / f"{name}.yaml")


def every_stage() -> tuple[Stage, ...]:
    """The stages of all studies."""
    return (*STAGES, *FAIR, *CRITIC, *REUSE)


def stages_of(trial: str) -> tuple[Stage, ...]:
    """The stages of a study, in order."""
    return tuple(stage for stage in every_stage() if stage.trial == trial)


def exists(name: str) -> bool:
    """Whether there is a stage of this name."""
    return any(stage.name == name for stage in every_stage())


def stage_of(name: str) -> Stage:
    """The stage of this name."""
    return next(stage for stage in every_stage() if stage.name == name)


def with_rate(arm: Arm, rate: float, flag: str = RATE) -> Arm:
    """The arm with a learning rate, which is a part of its method's name: plain_0.0001."""
    name = f"{arm.method}_{rate:.7f}".rstrip("0")
    return replace(arm, method=name, label=f"{arm.label}, {rate:.0e}", flags={**arm.flags, flag: rate})


def nearest_of(stage: Stage) -> dict[str, str]:
    """The searched method whose learning rate a method of the stage takes, if it is not its own."""
    if stage.rates_of:
        return dict(stage.rates_of)
    return NEAREST | (HARD_NEAREST if stage.part == 2 else {}) | dict.fromkeys(sum(stage.climb, ()), "filter_only")


def study_of(stage: Stage, root: Path) -> Study:
    """The study of a stage, with the learning rates that are known so far.

    Raises:
        NotYet: The search that its rates come from has not ended.
    """
    study = definition(stage.study)
    arms = {
        arm.method: replace(arm, flags={**arm.flags, **stage.flags})
        for arm in study.arms
        if arm.method in stage.seconds
    }
    chosen_arms, settings = list(arms.values()), None
    if stage.settings_from:
        settings = settings_of(stage_of(stage.settings_from), root)
        if settings is None:
            return replace(study, arms=(), seeds=stage.seeds)
    if RATE in stage.flags:
        chosen_arms = [with_rate(arm, stage.flags[RATE]) for arm in chosen_arms]
    elif stage.grid:
        chosen_arms = [
            with_rate(arm, rate, stage.rate)
            for method, arm in arms.items()
            for rate in search_of(stage, method, root).rates
        ]
    elif stage.rates_from:
        chosen = chosen_rates(stage_of(stage.rates_from), root)
        nearest = nearest_of(stage)
        chosen_arms = [
            replace(arm, flags={**arm.flags, stage.rate: chosen[nearest.get(method, method)]})
            for method, arm in arms.items()
        ]
    if stage.best_of:
        best = best_method(stage, root)
        chosen_arms = [arm for arm in chosen_arms if arm.method == best or arm.method not in stage.best_of]
    if stage.matched:
        chosen_arms = [arm for arm in (sized(stage, one, root) for one in chosen_arms) if arm]
    if stage.climb:
        chosen_arms = climbed(stage, chosen_arms, root).arms
    elif settings:
        chosen_arms = [on_top(settings, arm) for arm in chosen_arms]
    return replace(study, arms=tuple(chosen_arms), seeds=stage.seeds)


def planned(stage: Stage, root: Path) -> list[Planned]:
    """The runs of a stage, seed by seed. A search that has to be widened has more of them when the first ones ended."""
    return plan(study_of(stage, root), stage.folder(root))


def ended(run: Planned) -> bool:
    """Whether a run is done, or has failed for good."""
    return run.done or (run.folder / FAILED).exists()


def results_of(study: Study, runs: Sequence[Planned]) -> Results:
    """The runs of a study that are done."""
    done = [run for run in runs if run.done]
    return Results(study, [StudyRun(run.arm, run.seed, read_run(run.folder)) for run in done])


# ── searches ──


class Search(NamedTuple):
    """How far the search for a method's learning rate has come.

    Attributes:
        rates: The rates that are searched so far: the grid, and those beyond an end at which the best one was. None
            if the heights are those of HEIGHTS, because no run is needed.
        heights: What `heights` says of them.
    """

    rates: list[float]
    heights: dict[float, float] | None


def heights(stage: Stage, method: str, rates: Sequence[float], root: Path) -> dict[float, float] | None:
    """The lowest of the `heights_of_seeds` by rate, or their mean (`Stage.by_mean`); None if a run has not ended."""
    found = heights_of_seeds(stage, method, rates, root)
    judge = np.mean if stage.by_mean else min
    return None if found is None else {rate: float(judge(of_seeds)) for rate, of_seeds in found.items()}


def heights_of_seeds(stage: Stage, method: str, rates: Sequence[float], root: Path) -> dict[float, list[float]] | None:
    """Heights of the learning curves of a method with each rate, up to an equal cost.

    Returns:
        Those of the seeds by rate. A rate one of whose runs failed is left out. None if a run has not ended.
    """
    study = definition(stage.study)
    arm = next(arm for arm in study.arms if arm.method == method)
    arms = {rate: with_rate(arm, rate, stage.rate) for rate in rates}
    study = replace(study, arms=tuple(arms.values()), seeds=stage.seeds)
    runs = plan(study, stage.folder(root))
    if not all(map(ended, runs)):
        return None
    whole = {rate: name for rate, name in ((rate, arm.name) for rate, arm in arms.items())
             if all(run.done for run in runs if run.arm.name == name)}  # fmt: skip
    curves = curves_of(stage, results_of(study, runs), list(whole.values()))
    return {rate: [float(height) for height in curves[name]] for rate, name in whole.items()}


def curves_of(stage: Stage, results: Results, arms: Sequence[str]) -> pd.Series:
    """Heights of the learning curves of these arms at the equal cost of a search; the index is (arm, seed)."""
    return results.curve(arms, ROLLOUTS if stage.share is None else priced(results, stage.share))


def known_heights(stage: str) -> dict[str, dict[float, float]]:
    """What HEIGHTS says of a search: the height of each rate by method."""
    found: dict[str, dict[float, float]] = {}
    for row in pd.read_csv(HEIGHTS).query("stage == @stage").itertuples():
        found.setdefault(row.method, {})[row.rate] = row.height
    return found


def search_of(stage: Stage, method: str, root: Path) -> Search:
    """How far the search of a stage has come for a method."""
    if known := known_heights(stage.name).get(method):
        return Search([], known)
    rates, more = list(stage.grid), {"low": 0, "high": 0}
    while by_rate := heights(stage, method, rates, root):
        best = max(by_rate, key=by_rate.__getitem__)
        if stage.by_mean:
            break
        if best == rates[0] and more["low"] < MOST_MORE:
            rates, more["low"] = [best / FACTOR, *rates], more["low"] + 1
        elif best == rates[-1] and more["high"] < MOST_MORE:
            rates, more["high"] = [*rates, best * FACTOR], more["high"] + 1
        else:
            break
    return Search(rates, by_rate)


def choose(by_rate: Mapping[float, float], near: float = NEAR) -> float:
    """The smallest of the rates whose height is at most `near` below the best one.

    Two seeds do not tell such rates apart, and the runs at a larger rate differ more from seed to seed.
    """
    best = max(by_rate.values())
    return min(rate for rate, height in by_rate.items() if height >= best - near)


def chosen_of(stage: Stage, by_rate: Mapping[float, float]) -> float:
    """The rate that a search takes: see `Stage.by_mean`."""
    return choose(by_rate, 0.0 if stage.by_mean else NEAR)


def chosen_rates(stage: Stage, root: Path) -> dict[str, float]:
    """The learning rate of each method that a search has found.

    Raises:
        NotYet: The search has not ended.
        RunError: It has found no rate for a method.
    """
    if (stage.name, root) not in _chosen:
        chosen = {}
        for method in stage.seconds:
            by_rate = search_of(stage, method, root).heights
            if by_rate == {}:
                raise RunError(f"the search {stage.name}: a run of each rate of {method} has failed")
            if by_rate is None:
                raise NotYet(f"the search {stage.name} has not ended for {method}")
            chosen[method] = chosen_of(stage, by_rate)
        _chosen[stage.name, root] = chosen
    return _chosen[stage.name, root]


def best_method(stage: Stage, root: Path) -> str:
    """The method of `Stage.best_of` whose runs with the rate that was found for it are the highest, by their mean."""
    search = stage_of(stage.rates_from)
    chosen = chosen_rates(search, root)
    arms = {arm.method: arm for arm in definition(search.study).arms}
    rated = {method: with_rate(arms[method], chosen[method]) for method in stage.best_of}
    study = replace(definition(search.study), arms=tuple(rated.values()), seeds=search.seeds)
    results = results_of(study, plan(study, search.folder(root)))
    means = curves_of(search, results, [arm.name for arm in rated.values()]).groupby("arm").mean()
    return max(rated, key=lambda method: means[rated[method].name])


# ── as many optimizer steps as another method ──


def optimizer_steps(trained: Sequence[int], size: int) -> int:
    """Optimizer steps of a run of one epoch.

    Args:
        trained: Responses that each trainer step trains on.
        size: `train.batch_size`.
    """
    return sum(-(-responses // size) for responses in trained)


def matched_size(search: Stage, method: str, rate: float, root: Path) -> int | None:
    """The `train.batch_size` with which a method makes as many optimizer steps in a run as another one.

    Both are known from runs of a search: the steps of the other method, the mean of its runs with the rate that was
    found for it, and the batches of `method`, those of the method that has them, with the rate that `method` gets. Of
    SIZES, the one is taken whose steps are nearest.

    Returns:
        None if these searches have not ended.
    """
    other, batches = search.matched[method]
    if not (by_rate := search_of(search, other, root).heights) or not search_of(search, batches, root).heights:
        return None
    made = [
        optimizer_steps(trained, size) for trained, size in of_search(search, other, chosen_of(search, by_rate), root)
    ]
    runs = of_search(search, batches, rate, root) or of_search(search, batches, None, root)
    steps = {size: np.mean([optimizer_steps(trained, size) for trained, _ in runs]) for size in SIZES}
    return min(SIZES, key=lambda size: abs(steps[size] - np.mean(made)))


def of_search(search: Stage, method: str, rate: float | None, root: Path) -> list[tuple[list[int], int]]:
    """Of the runs of a method in a search that are done: responses trained on in each step, and `train.batch_size`.

    Args:
        rate: Their learning rate; None: any.
    """
    arms = [arm for arm in definition(search.study).arms if arm.method == method]
    rated = tuple(with_rate(arm, one) for arm in arms for one in (search.grid if rate is None else (rate,)))
    runs = plan(replace(definition(search.study), arms=rated, seeds=search.seeds), search.folder(root))
    return [
        ([row["responses/trained"] for row in record.read_metrics(run.folder)],
         record.read_run(run.folder)["config"]["train.batch_size"])
        for run in runs if run.done
    ]  # fmt: skip


def sized(stage: Stage, arm: Arm, root: Path) -> Arm | None:
    """The arm with its `train.batch_size`, if it is in `Stage.matched`; None as long as that is not known."""
    if (method := method_of(arm)) not in stage.matched:
        return arm
    search = stage if stage.grid else stage_of(stage.rates_from)
    size = matched_size(search, method, arm.flags[RATE], root)
    return size and replace(arm, flags={**arm.flags, "train.batch_size": size})


# ── climbs ──


class Climb(NamedTuple):
    """How far a climb has come.

    Attributes:
        arms: Those that have been run, or have to be run now.
        best: The one whose critic explains most; None if none has ended well.
        explained: The share of the variance of the returns that it explains.
        over: Whether nothing is left to be run.
    """

    arms: list[Arm]
    best: Arm | None
    explained: float
    over: bool


def explained(run: Planned, metric: str = EXPLAINED) -> float:
    """The explained variance of a run that is done: the mean over the second half of its steps that have one."""
    values = [row[metric] for row in record.read_metrics(run.folder) if row.get(metric) is not None]
    return float(np.mean(values[len(values) // 2 :])) if values else -np.inf


def on_top(settings: Arm, arm: Arm) -> Arm:
    """The arm with the settings of another one, which give way to its own."""
    config = [*settings.config, *(file for file in arm.config if file not in settings.config)]
    return replace(arm, config=tuple(config), flags={**settings.flags, **arm.flags})


def climbed(stage: Stage, arms: Sequence[Arm], root: Path) -> Climb:
    """Go through the steps of a climb until the critic explains ENOUGH, or as far as the runs that have ended.

    Of the runs of an arm, the one counts whose critic explains least.
    """
    by_method, seen, best, most = {arm.method: arm for arm in arms}, [], None, -np.inf
    for step in stage.climb:
        here = [on_top(best, by_method[method]) if best else by_method[method] for method in step]
        seen += here
        study = replace(definition(stage.study), arms=tuple(here), seeds=stage.seeds)
        runs = plan(study, stage.folder(root))
        if not all(map(ended, runs)):
            return Climb(seen, best, most, over=False)
        of_arm = {arm.name: [run for run in runs if run.arm.name == arm.name] for arm in here}
        found = {
            min(map(explained, of_arm[arm.name])): arm for arm in here if all(run.done for run in of_arm[arm.name])
        }
        if max(found, default=-np.inf) > most:
            most = max(found)
            best = found[most]
        if most >= ENOUGH:
            break
    return Climb(seen, best, most, over=True)


def settings_of(stage: Stage, root: Path) -> Arm | None:
    """The settings that a climb has found, as an arm without a learning rate; None if no critic explains ENOUGH.

    Raises:
        NotYet: The climb has not ended.
    """
    result = climbed(stage, study_of(stage, root).arms, root)
    if not result.over:
        raise NotYet(f"the climb {stage.name} has not ended")
    if result.best is None or result.explained < ENOUGH:
        return None
    return replace(result.best, flags={name: value for name, value in result.best.flags.items() if name != RATE})


# ── time ──


def seconds_left(stage: Stage, root: Path) -> tuple[int, float]:
    """How many runs of a stage have not ended, and the seconds that they take, several at a time.

    Runs of a method that were done already say how long it takes. Without any, the estimate of the stage counts. If
    the rates are not known yet, all runs of the stage are left. If a search has found none, no run is left.
    """
    try:
        runs = planned(stage, root)
    except NotYet:
        seconds = [seconds for method, seconds in stage.seconds.items() if method not in stage.best_of[1:]]
        return len(seconds) * len(stage.seeds), len(stage.seeds) * sum(seconds) / stage.parallel
    except RunError:
        return 0, 0.0
    left, measured = [run for run in runs if not ended(run)], {}
    for run in runs:
        if run.done:
            seconds = record.read_summary(run.folder)["seconds"]["whole_run"]
            measured.setdefault(method_of(run.arm), []).append(seconds + (COUNTED if stage.solved else 0))
    of_method = {**stage.seconds, **{name: sum(times) / len(times) for name, times in measured.items()}}
    later = stage.matched.keys() - {method_of(run.arm) for run in runs}  # in a search, their size is not known yet
    more = [of_method[method] for method in later for _ in stage.grid for _ in stage.seeds]
    return len(left) + len(more), (sum(of_method[method_of(run.arm)] for run in left) + sum(more)) / stage.parallel


def method_of(arm: Arm) -> str:
    """The arm's method without a learning rate."""
    name, _, rate = arm.method.rpartition("_")
    return name if rate[:1] == "0" and rate[1:2] == "." else arm.method

"""The runs of a study, and its numbers as pandas tables. No file is read and nothing is drawn.

The columns "arm" and "seed" name a run in every table. "arm" holds the arm's name, such as bapo-group.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas

from bapo_openrlhf.adapt.vocabulary import SOURCES
from bapo_openrlhf.record.run_record import REWARD, end_means
from bapo_openrlhf.record.shapes import number
from bapo_openrlhf.workbench.pages.colours import PHASE_LABELS
from bapo_openrlhf.workbench.pages.text import is_number
from bapo_openrlhf.workbench.report.accuracy import hard_prompts
from bapo_openrlhf.workbench.report.runs import TRIPPED, Run, tokens_spared
from bapo_openrlhf.workbench.study.definition import Arm, Study

PLAIN = "plain"  # the method that is the baseline of its path
PATHS = {"group": "group-relative advantages", "critic": "critic (GAE)"}
RUN = ["arm", "seed"]  # the columns that name a run
FIRST_COLUMNS = ["method", "path", "label", "seed", "step", "done"]  # the columns before the metrics
ROLLOUTS, TOKENS_TRAINED = "rollouts/total", "tokens/trained_total"  # running totals
DEMONSTRATIONS = "demonstrations/tokens"  # of worked solutions that a step trains on, which TOKENS_TRAINED lacks
CRITIC = "tokens/critic"  # that the critic of a step trains on; an older record does not have them
# Running total of tokens trained on: with those of worked solutions and of the critic, and each epoch counted. If a
# gate has ended the reuse of a batch, the epochs of the actor are counted as far as they were made.
UPDATE_TOKENS = "cost/updated"
SECONDS = "timing/"  # prefix of the seconds that the phases of a step took
ALL_SECONDS = "timing/step_total"
STEP_METRICS = (
    *(REWARD, ROLLOUTS, TOKENS_TRAINED, ALL_SECONDS, "groups/capacity_used"),
    *(f"groups/{source}" for source in SOURCES),
)  # metrics that have a column in `Results.steps` even if no run recorded them
Frame = TypeVar("Frame", pandas.DataFrame, pandas.Series)


@dataclass(frozen=True)
class StudyRun:
    """One seed of an arm."""

    arm: Arm
    seed: int
    run: Run

    @property
    def key(self) -> tuple[str, int]:
        """The names of the arm and the seed, which are the index of tables of runs."""
        return self.arm.name, self.seed

    @property
    def finished(self) -> bool:
        """Whether all steps are there. The last accuracy of an interrupted run is not its final accuracy."""
        planned = self.run.metadata.get("total_steps")
        return bool(self.run.summary) or not is_number(planned) or self.run.last_step >= planned


def _frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """The numbers of rows. A reward function may return other values, and a damaged record may have them."""
    return pandas.DataFrame([{name: value for name, value in row.items() if number(value)} for row in rows])


def _frozen_steps(flags: Mapping[str, Any]) -> float:
    """The first steps whose batches never reach the actor. Plain OpenRLHF keeps them for the actor's first update."""
    last = flags.get("critic.freezing_steps", -1)
    return last + 1 if is_number(last) and flags.get("adapt.method") != "none" else 0


def _numbers(flags: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A flag of each run, 1 if its record does not have it."""
    return np.array([config[name] if is_number(config.get(name)) else 1 for config in flags])


def write_table(table: pandas.DataFrame, out: Path) -> list[Path]:
    paths = [out / "table.parquet", out / "table.csv"]
    table.to_parquet(paths[0], index=False)
    table.to_csv(paths[1], index=False)
    return paths


@dataclass(frozen=True)
class Results:
    """A study with those of its runs that are there."""

    study: Study
    runs: Sequence[StudyRun]

    # ── arms ──

    @cached_property
    def labels(self) -> dict[str, str]:
        """The label of each arm by its name. If two arms have the same label, the path or the name is added."""
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
        """The runs of each arm of the study, in the order of the seeds. An arm without runs has an empty list."""
        runs = sorted(self.runs, key=lambda study_run: study_run.seed)
        return {arm.name: [run for run in runs if run.arm.name == arm.name] for arm in self.study.arms}

    @cached_property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(arm.path for arm in self.study.arms if self.by_arm[arm.name]))

    def arms_of_path(self, path: str) -> list[Arm]:
        """The arms of a path that have a run. The baseline (the plain method, otherwise the first arm) is first."""
        arms = [arm for arm in self.study.arms if arm.path == path and self.by_arm[arm.name]]
        return sorted(arms, key=lambda arm: arm.method != PLAIN)

    @cached_property
    def arms(self) -> list[Arm]:
        """The arms that have a run, path by path with the baseline first."""
        return [arm for path in self.paths for arm in self.arms_of_path(path)]

    def rows_of_arm(self, table: Frame, arm: Arm) -> Frame:
        """The rows of an arm from a table whose index is (arm, seed); the index of the result is the seed."""
        return table[table.index.get_level_values("arm") == arm.name].droplevel("arm")

    # ── steps ──

    @cached_property
    def table(self) -> pandas.DataFrame:
        """A row for each step of a run: FIRST_COLUMNS, its metrics and its evaluation. What is no number is NaN."""
        frames = []
        for study_run in self.runs:
            rows = _frame(study_run.run.rows)
            if study_run.run.evaluations:
                rows = rows.merge(_frame(study_run.run.evaluations), on="step", how="left")
            columns = {name: getattr(study_run.arm, name) for name in ("method", "path", "label")}
            frames.append(rows.assign(**columns, seed=study_run.seed, done=bool(study_run.run.summary)))
        whole = pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame(columns=FIRST_COLUMNS)
        return whole[[*FIRST_COLUMNS, *sorted(set(whole.columns) - set(FIRST_COLUMNS))]]

    @cached_property
    def steps(self) -> pandas.DataFrame:
        """All steps: arm, seed, step, every metric as a float (NaN if it is no finite number), and UPDATE_TOKENS."""
        metrics = [*dict.fromkeys([*STEP_METRICS, *self.table.columns.difference(FIRST_COLUMNS, sort=False)])]
        numbers = self.table.reindex(columns=metrics).apply(pandas.to_numeric, errors="coerce").astype(float)
        keys = self.table[["seed", "step"]].assign(arm=self.table["method"] + "-" + self.table["path"])
        steps = pandas.concat([keys, numbers.replace([np.inf, -np.inf], np.nan)], axis=1)
        return steps.assign(**{UPDATE_TOKENS: self.update_tokens(steps)})

    def update_tokens(self, steps: pandas.DataFrame) -> np.ndarray:
        """The values of the column UPDATE_TOKENS, from those of other columns."""
        of_run = {study_run.key: study_run.run.config for study_run in self.runs}
        flags = [of_run[key] for key in zip(steps["arm"], steps["seed"], strict=True)]
        frozen = steps[TOKENS_TRAINED].where(steps["step"] <= [*map(_frozen_steps, flags)])
        tokens = steps[TOKENS_TRAINED] - steps.assign(frozen=frozen).groupby(RUN)["frozen"].ffill().fillna(0.0)
        for metric in (DEMONSTRATIONS, CRITIC):
            if metric in steps:
                tokens = tokens + steps.fillna({metric: 0.0}).groupby(RUN)[metric].cumsum()
        epochs, sizes = (_numbers(flags, name) for name in ("train.max_epochs", "train.batch_size"))
        total = tokens * epochs
        if TRIPPED in steps:
            total = total - steps.assign(spared=tokens_spared(steps, epochs, sizes)).groupby(RUN)["spared"].cumsum()
        return total.to_numpy()

    @cached_property
    def last_step(self) -> int:
        return int(self.steps["step"].max())

    @cached_property
    def means(self) -> pandas.DataFrame:
        """The mean of every metric over the seeds that have it; the index is (arm, step)."""
        return self.steps.drop(columns=["seed", UPDATE_TOKENS]).groupby(["arm", "step"]).mean()

    @cached_property
    def pooled(self) -> dict[str, Run]:
        """The seeds of each arm as one run, by its name: mean metrics, all groups, and prompts that differ by seed."""
        return {arm.name: self._pool(arm) for arm in self.arms}

    def _pool(self, arm: Arm) -> Run:
        means = self.means.loc[arm.name].reset_index().to_dict("records")
        runs = self.by_arm[arm.name]
        tables = [(study_run.seed, study_run.run.groups) for study_run in runs if not study_run.run.groups.empty]
        parts = [table.assign(prompt=f"{seed} " + table["prompt"].astype(str)) for seed, table in tables]
        groups = pandas.concat(parts).sort_values("step", kind="stable") if parts else pandas.DataFrame()
        return Run(self.labels[arm.name], means, runs[0].run.metadata, groups)

    # ── runs ──

    @cached_property
    def numbers(self) -> pandas.DataFrame:
        """What each run spent and reached; the index is (arm, seed).

        `solved` is the share of the prompts without a right response in their first group that a later group solved.
        """
        by_run = self.steps.groupby(RUN)
        finished = {study_run.key: study_run.finished for study_run in self.runs}
        hard = {study_run.key: hard_prompts(study_run.run.groups) for study_run in self.runs}
        shares = {key: counts.solutions / counts.prompts for key, counts in hard.items() if counts.prompts}
        tokens = by_run[TOKENS_TRAINED].last()
        return pandas.DataFrame({
            "finished": pandas.Series([finished[key] for key in tokens.index], tokens.index, bool),
            "rollouts": by_run[ROLLOUTS].last(),
            "tokens_trained": tokens,
            "update_tokens": by_run[UPDATE_TOKENS].last(),
            "seconds": by_run[ALL_SECONDS].sum(min_count=1),
            "reward_end": by_run[REWARD].agg(lambda rewards: end_means(rewards)[1]),
            "solved": pandas.Series([shares.get(key) for key in tokens.index], tokens.index, float),
        }, index=tokens.index)  # fmt: skip

    @cached_property
    def finished_numbers(self) -> pandas.DataFrame:
        """The `numbers` of finished runs."""
        return self.numbers[self.numbers["finished"]]

    @cached_property
    def final(self) -> pandas.DataFrame:
        """Final accuracy (pass@1) of each finished run that has all benchmarks, sorted; the index is (arm, seed)."""
        last = self.evaluations.drop_duplicates(RUN, keep="last").set_index(RUN).sort_index()
        finished = self.numbers["finished"].reindex(last.index)
        return last.loc[finished & bool(self.benchmarks), self.benchmarks].dropna()

    def scores(self, arm: Arm) -> np.ndarray:
        """Final accuracies of the arm's runs that have them, shape (runs, benchmarks)."""
        return self.rows_of_arm(self.final, arm).to_numpy()

    @cached_property
    def seconds(self) -> pandas.DataFrame:
        """Mean seconds of a finished run by phase, 0 for seeds that lack it, NaN if all do; the index is the arm."""
        names = [name.removeprefix(SECONDS) for name in self.steps if name.startswith(SECONDS) and name != ALL_SECONDS]
        seconds = self.steps.groupby(RUN)[[SECONDS + name for name in names]].sum(min_count=1).set_axis(names, axis=1)
        by_arm = seconds[self.numbers["finished"]].groupby("arm")
        ordered = [*filter(names.__contains__, PHASE_LABELS), *sorted({*names} - {*PHASE_LABELS})]
        return by_arm.sum(min_count=1).div(by_arm.size(), axis=0)[ordered].dropna(axis=1, how="all")

    def measure(self, name: str, arms: Sequence[str]) -> pandas.Series:
        """Accuracy, curve, rollouts or solved of the finished runs that have it; the index is (arm, seed)."""
        if name == "accuracy":
            return self.final.mean(axis=1)
        if name == "curve":
            return self.curve(arms)
        return self.finished_numbers[name].dropna()

    def curve(self, arms: Sequence[str], total: str = ROLLOUTS) -> pandas.Series:
        """Mean height of the learning curve of each finished run of these arms; the index is (arm, seed).

        It is the area under the held-out accuracy from 0 to R responses, by the trapezoidal rule, divided by R, the
        smallest number of responses at the last evaluation of any of these runs. It begins at the study's `start`, or
        at the height of the first evaluation. `total` is the running total in `steps` that stands for the responses.
        """
        places = self.with_total(self.accuracy, total).set_index(RUN)
        finished = [key for key in dict.fromkeys(places.index) if key[0] in arms and self.numbers["finished"][key]]
        curves = {key: places.loc[[key], [total, "accuracy"]].to_numpy().T for key in finished}
        curves = {key: curve for key, curve in curves.items() if curve[0, -1] > 0}
        end = min((responses[-1] for responses, _ in curves.values()), default=0.0)
        heights = {}
        for key, (responses, accuracy) in curves.items():
            start = accuracy[0] if self.study.start is None else self.study.start
            x, y = np.array([0.0, *responses]), np.array([start, *accuracy])  # x may be the same at several evaluations
            last = int(np.searchsorted(x, end))  # the first of them at or after the end
            at_end = np.interp(end, x[: last + 1], y[: last + 1])
            heights[key] = np.trapezoid([*y[:last], at_end], [*x[:last], end]) / end
        index = pandas.MultiIndex.from_tuples(list(heights), names=RUN) if heights else self.numbers.index[:0]
        return pandas.Series(list(heights.values()), index, float)

    # ── accuracy during the run ──

    @property
    def benchmarks(self) -> list[str]:
        """The columns of `evaluations` that hold pass@1 on a benchmark."""
        return [f"eval_{name}_pass1" for name in self.study.evaluations]

    @cached_property
    def evaluations(self) -> pandas.DataFrame:
        """All evaluations: arm, seed, step, pass@1 per benchmark, and accuracy, their mean (NaN if one is lacking)."""
        rows = [
            {**row, "arm": study_run.arm.name, "seed": study_run.seed}
            for study_run in self.runs
            for row in study_run.run.evaluations
        ]
        table = pandas.DataFrame(rows, columns=[*RUN, "step", *self.benchmarks])
        scores = table[self.benchmarks].apply(pandas.to_numeric, errors="coerce").astype(float)
        return table.assign(**scores, accuracy=scores.mean(axis=1, skipna=False))

    @cached_property
    def accuracy(self) -> pandas.DataFrame:
        """The evaluations that have an accuracy: arm, seed, step, accuracy."""
        return self.evaluations[[*RUN, "step", "accuracy"]].dropna()

    @cached_property
    def why_no_accuracy(self) -> str:
        if not self.benchmarks:
            return "the study names no evaluations"
        has_values = self.evaluations[self.benchmarks].notna().any()
        if not has_values.any():
            return "no evaluation was recorded"
        absent = ", ".join(name for name, has in zip(self.study.evaluations, has_values, strict=True) if not has)
        why = f"no evaluation has all of {', '.join(self.study.evaluations)}"
        return f"{why}: {absent} is in none" if absent else why

    def total_at_target(self, target: float, total: str) -> pandas.Series:
        """A running total at the first evaluation at or above the target; runs that never reached it are left out."""
        reached = self.accuracy[self.accuracy["accuracy"] >= target].drop_duplicates(RUN)
        return self.with_total(reached, total).set_index(RUN)[total]

    def with_total(self, places: pandas.DataFrame, total: str) -> pandas.DataFrame:
        """The places (arm, seed, step, ...) with a running total then: 0 before the first step, dropped if unknown."""
        kinds = {"arm": str, "seed": int, "step": float}  # also if a table is empty
        totals = self.steps[[*RUN, "step", total]].dropna().astype(kinds).sort_values("step")
        places = places.astype(kinds).sort_values("step", kind="stable")
        table = pandas.merge_asof(places, totals, on="step", by=RUN)
        table[total] = table[total].where(table[total].notna() | (table["step"] > 0), 0.0)
        return table.dropna(subset=total)


def band(curves: Sequence[pandas.Series]) -> pandas.DataFrame:
    """Quartiles (low, median, high) by x of the interpolated curves of seeds, if at least half are known there."""
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return pandas.DataFrame(columns=["low", "median", "high"], dtype=float)
    table = pandas.concat(curves, axis=1, keys=range(len(curves)), sort=True).interpolate("index", limit_area="inside")
    rows = table[2 * table.notna().sum(axis=1) >= len(curves)]
    return rows.quantile([0.25, 0.5, 0.75], axis=1).T.set_axis(["low", "median", "high"], axis=1)


# ── what is not there ──


def missing(results: Results) -> list[str]:
    """Sentences about runs and evaluations that are not there, or not complete."""
    sentences = []
    for arm in results.study.arms:
        name, runs = results.labels[arm.name], results.by_arm[arm.name]
        seeds = [study_run.seed for study_run in runs]
        if absent := [seed for seed in arm.seeds or results.study.seeds if seed not in seeds]:
            sentences.append(f"{name}: no run of seed {', '.join(map(str, absent))}.")
        sentences += [
            f"{name}, seed {study_run.seed}: stopped at step {study_run.run.last_step:,} of "
            f"{study_run.run.metadata['total_steps']:,}; in the curves until there, not in the final numbers."
            for study_run in runs
            if not study_run.finished
        ]
        final = results.rows_of_arm(results.final, arm).index
        if absent := [study_run.seed for study_run in runs if study_run.finished and study_run.seed not in final]:
            sentences.append(f"{name}: no final accuracy of seed {', '.join(map(str, absent))}.")
        sentences += [
            f"{name}, seed {study_run.seed}: its final accuracy is that after step "
            f"{study_run.run.evaluations[-1]['step']:,} of {study_run.run.last_step:,}; none was made later."
            for study_run in runs
            if study_run.seed in final and study_run.run.evaluations[-1]["step"] < study_run.run.last_step
        ]
    return sentences

"""What the runs of decision_design.md say: the primary comparisons, gains by the share of generation, and how the arms
update.

    python research/decision.py                    # the kept records; writes results/decision/ and the figure
    python research/decision.py --runs ../decision # the runs in another worktree, however far they are
    python research/decision.py --runs ../decision --keep  # the same, and keeps their records
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import age_or_distance
import altair as alt
import numpy as np
import pandas as pd
from decision_runs import mixtures, origins_of
from decision_stages import (
    ENOUGH,
    ONE_RATE,
    RATE,
    STAGES,
    NotYet,
    Stage,
    choose,
    chosen_of,
    ended,
    every_stage,
    exists,
    explained,
    heights_of_seeds,
    method_of,
    planned,
    results_of,
    search_of,
    stage_of,
    study_of,
)  # fmt: skip
from dose import between_prompts, doses
from folders import DOCS_IMAGES
from hard_prompts import AGAIN, SOLVED
from kept_records import folder_of, keep_all, unpack
from power import power
from replay_map import (
    FREE,
    add_costs,
    by_share,
    discount,
    heights,
    optimizer_steps,
    skipped,
    units_of,
    with_free_groups,
    without_signal,
)  # fmt: skip
from scipy import stats

from bapo_openrlhf.errors import RunError
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.colours import MUTED, PALETTE
from bapo_openrlhf.workbench.pages.figure import save_svg
from bapo_openrlhf.workbench.study.data import PLAIN, ROLLOUTS, RUN, Results
from bapo_openrlhf.workbench.study.runner import Planned
from bapo_openrlhf.workbench.study.statistics import LEVEL, holm, mean_interval, sign_flip_p

ALPHA = 0.05
FOLDER = folder_of("decision")
COLUMNS = {"responses": ROLLOUTS, "tokens": "cost/tokens"}
DRAWN = {  # the arms of the figure and their colours
    "GRPO, half of the prompts": PALETTE[6], "GRPO, two epochs": PALETTE[0], "filter only": PALETTE[2],
    "BAPO, all near groups": PALETTE[4], "BAPO": PALETTE[1],
}  # fmt: skip
BEYOND = (("without_x2", "filter_only_delayed"), ("bapo", "filter_only_delayed"))  # at each cost too: all have v = 2
PRICED_AS = {"in_denominator-group": "filter_only-group"}  # see `set_costs`
FORMS_OF_X2 = ("bapo", "bapo_c1_0", "bapo_asks_eighths")
HELPED = ("luffy", "ar3po")  # methods that add a right response to groups whose recorded mean is 0
FIRST_NEAR = 0.02  # the rule for rates that was committed first: the mean of the runs, and this in the place of NEAR
CHANGED = {  # when the changes were made that a review of the design had asked for: see `ended_before`
    "written": "2026-11-27T14:10:32+00:00", "committed": "2026-11-27T14:20:37+00:00"
}  # fmt: skip
NOT_YET, NOT_TESTED = "not yet", "not tested"  # see `no_answer`


class Comparison(NamedTuple):
    """A primary comparison.

    Attributes:
        question: What it answers.
        stage: The stage whose runs are compared.
        better, than: Methods. The outcome of the second is subtracted from that of the first.
        outcome: "curve" is the mean height of the learning curve, and "solved" the share of the never solved problems
            that the trained model solves.
        cost: What is equal: "responses" or "tokens"; "passes" for what is counted at the end of a run.
        counts: The smallest difference that counts, in points.
        path: "group" or "critic".
    """

    question: str
    stage: str
    better: str
    than: str
    outcome: str
    cost: str
    counts: float
    path: str = "group"

    @property
    def arms(self) -> list[str]:
        """The names of both arms."""
        return [f"{method}-{self.path}" for method in (self.better, self.than)]


PRIMARY = (
    Comparison("Does the filter pay?", "runs", "filter_only", "plain", "curve", "tokens", 3),
    Comparison("Does replay add to the filter?", "runs", "without_x2", "filter_only", "curve", "tokens", 3),
    Comparison("Does BAPO add to the filter?", "runs", "bapo", "filter_only", "curve", "tokens", 3),
    Comparison("Is replay with v = 2 worth more than a second epoch, in as many optimizer steps?", "runs",
               "replay_all_two_steps", "two_epochs", "curve", "responses", 3),
    Comparison("Is replay with v = 2 worth more than smaller batches?", "runs", "replay_all", "half", "curve",
               "responses", 3),
    Comparison("Are smaller batches worth more than the filter?", "runs", "half", "filter_only", "curve", "tokens", 3),
    Comparison("Does BAPO solve more of what was never solved?", "hard", "bapo", "plain", "solved", "passes", 6),
    Comparison("Does X2 do it?", "hard", "bapo", "without_x2", "solved", "passes", 6),
    Comparison("Does replay add to the filter with a critic?", "critic", "without_x2", "filter_only", "curve",
               "tokens", 3, "critic"),
)  # fmt: skip


# ── records ──


@dataclass
class Records:
    """The runs of the stages that have any, in the project's folder `root`."""

    root: Path
    _read: dict[str, Results | None] = field(default_factory=dict)

    def planned(self, name: str) -> list[Planned] | None:
        """All runs of a stage; none if a search has found no learning rate. None if its rates are not known yet."""
        try:
            return planned(stage_of(name), self.root) if exists(name) else []
        except NotYet:
            return None
        except RunError:
            return []

    def over(self, name: str) -> bool:
        """Whether all planned runs of a stage have ended. Until then, none of its outcomes is shown."""
        runs = self.planned(name)
        return runs is not None and all(map(ended, runs))

    def counted(self, name: str, arm: str) -> bool:
        """Whether all planned runs of an arm have ended, and it is counted what their models solve."""
        runs = self.planned(name)
        of_arm = [run for run in runs or () if run.arm.name == arm]
        return runs is not None and all(ended(run) and (run.done <= (run.folder / SOLVED).is_file()) for run in of_arm)

    def runs(self, stage: Stage) -> list[Planned]:
        """The runs of a stage that are done; none if its learning rates are not known."""
        return [run for run in self.planned(stage.name) or () if run.done]

    def results(self, name: str) -> Results | None:
        """The runs of a stage with their costs, and those of the stages that are compared with it.

        None if there is no such stage, or none of its runs is done.

        Raises:
            ValueError: The runs of the stage are mixed.
        """
        if name not in self._read:
            self._read[name] = self._results(stage_of(name)) if exists(name) else None
        return self._read[name]

    def _results(self, stage: Stage) -> Results | None:
        if not (runs := self.runs(stage)):
            return None
        study = study_of(stage, self.root)
        for more in (other for other in every_stage() if other.beside == stage.name and self.over(other.name)):
            runs += self.runs(more)
            study = replace(study, arms=(*study.arms, *study_of(more, self.root).arms))
        if sentences := mixtures(origins_of(runs), paired=stage.paired):
            raise ValueError(f"stage {stage.name}: {'; '.join(sentences)}")
        results = results_of(study, runs)
        set_costs(results)
        return results

    def solved(self, name: str) -> pd.Series:
        """Share of the never solved problems that each run of a stage solves; the index is (arm, seed)."""
        shares = {}
        for run in self.runs(stage_of(name)) if exists(name) else ():
            if (run.folder / SOLVED).is_file():
                counts = pd.read_json(run.folder / SOLVED, typ="series")
                shares[run.arm.name, run.seed] = counts["solved"] / counts["of"]
        index = pd.MultiIndex.from_tuples(list(shares), names=RUN) if shares else pd.MultiIndex.from_arrays([[], []])
        return pd.Series(list(shares.values()), index, float)

    def probes(self) -> pd.DataFrame:
        """The groups of all probes of part 4: `setting`, `seed`, and the fields of probes.jsonl."""
        tables = [pd.DataFrame(columns=["setting", "seed", "step", "uid"])]
        for run in self.runs(stage_of("age")) if exists("age") else ():
            if (run.folder / record.PROBES).is_file():
                rows = pd.read_json(run.folder / record.PROBES, lines=True)
                tables.append(rows.assign(setting=run.arm.label, seed=run.seed))
        return pd.concat(tables[1:] or tables, ignore_index=True)

    def units(self, name: str = "units") -> pd.DataFrame:
        """Unit times: a row for each arm and round, with `response` and `update` in seconds."""
        rows = [
            {"arm": run.arm.name, "round": run.seed, **units_of(pd.DataFrame(record.read_metrics(run.folder)))}
            for run in self.runs(stage_of(name))
        ]
        return pd.DataFrame(rows, columns=["arm", "round", "response", "update"])


def set_costs(results: Results, units: pd.DataFrame | None = None) -> None:
    """Add the running totals of tokens and seconds to the steps, see `add_costs`.

    The arms in PRICED_AS have the costs of not training on groups without a signal, see `discount`.

    Args:
        units: Index: the arm. Columns: `response` and `update`, the seconds of one.
    """
    if units is not None:
        same = {arm: units.loc[other] for arm, other in PRICED_AS.items() if other in units.index}
        units = pd.concat([units.drop(index=list(same), errors="ignore"), pd.DataFrame(same).T])
    add_costs(results, units)
    discount(results, PRICED_AS)


# ── primary comparisons ──


def sides(records: Records, results: Results, comparison: Comparison) -> pd.DataFrame:
    """The outcome of both arms: a row for each seed that both have."""
    if comparison.outcome == "solved":
        shares = records.solved(comparison.stage)
        return pd.DataFrame() if shares.empty else shares.unstack(0).reindex(columns=comparison.arms).dropna()
    return heights(results, *comparison.arms, COLUMNS[comparison.cost])


def no_answer(records: Records, comparison: Comparison, pairs: int) -> str:
    """Why a comparison has no answer; "" if it has one.

    NOT_YET: not all planned runs of both arms have ended, or what a trained model solves is not counted. NOT_TESTED:
    all have ended, but there are no two pairs, or the critic of an arm explains less than ENOUGH, the mean over its
    runs.
    """
    runs = records.planned(comparison.stage)
    by_arm = [[run for run in runs or () if run.arm.name == arm] for arm in comparison.arms]
    of_both = [run for of_arm in by_arm for run in of_arm]
    if runs is None or not all(map(ended, of_both)):
        return NOT_YET
    if comparison.outcome == "solved" and not all(records.counted(comparison.stage, arm) for arm in comparison.arms):
        return NOT_YET
    if pairs < 2:
        return NOT_TESTED
    if comparison.path == "critic":
        known = [np.mean([explained(run) for run in of_arm if run.done]) for of_arm in by_arm]
        return NOT_TESTED if min(known) < ENOUGH else ""
    return ""


def primary(records: Records) -> pd.DataFrame:
    """The primary comparisons.

    Returns:
        A row for each: question, better, than, outcome, cost, pairs, gain, low, high (points), counts, p, p_holm and
        answer. One with no answer has no p, and one whose runs have not ended has no gain. In Holm's correction its
        p is 1, so that p_holm of the others can only become smaller.
    """
    rows, reasons = [], []
    for comparison in PRIMARY:
        row: dict[str, object] = {name: value for name, value in comparison._asdict().items() if name != "path"}
        results = records.results(comparison.stage)
        both = pd.DataFrame() if results is None else sides(records, results, comparison)
        row["pairs"] = len(both)
        reasons.append(reason := no_answer(records, comparison, len(both)))
        if len(both) > 1 and reason != NOT_YET:
            differences = 100 * (both.iloc[:, 0] - both.iloc[:, 1])
            interval = mean_interval(differences)
            row |= {"gain": interval.value, "low": interval.low, "high": interval.high}
            row |= {} if reason else {"p": sign_flip_p(differences)}
        rows.append(row)
    columns = [*rows[0], *(name for name in ("gain", "low", "high", "p") if name not in rows[0])]
    table = pd.DataFrame(rows, columns=columns)
    p = table["p"].astype(float)
    table["p_holm"] = pd.Series(holm(p.fillna(1.0))).where(p.notna())
    table["answer"] = [reason or answer(row) for reason, row in zip(reasons, table.to_dict("records"), strict=True)]
    return table


def answer(row: Mapping[str, object]) -> str:
    """What a comparison says.

    "ahead" or "behind": p with Holm's correction is below ALPHA. They are "by less than counts" if the interval lies
    within the smallest difference that counts. "no difference that counts": only that is so. "suggested": neither, but
    the interval excludes 0. "no information": nothing of this.
    """
    gain, low, high, p, counts = (float(row[name]) for name in ("gain", "low", "high", "p_holm", "counts"))
    within = -counts < low and high < counts
    if p < ALPHA:
        return ("ahead" if gain > 0 else "behind") + (", by less than counts" if within else "")
    if within:
        return "no difference that counts"
    return "suggested" if low > 0 or high < 0 else "no information"


# ── gains at each cost ──


class Interval(NamedTuple):
    """A mean with its interval, in the unit of the differences."""

    value: float
    low: float
    high: float


def crossed_interval(differences: np.ndarray) -> Interval:
    """Mean with a 95 % interval of differences that vary between pairs of runs, and between rounds of unit times.

    The interval has the half widths of two intervals of Student's in quadrature: that of the pairs' means over the
    rounds, and that of the rounds' means over the pairs. With one round, or rounds that do not differ, it is that of
    the pairs.

    Args:
        differences: Shape (rounds, pairs), with at least two pairs.
    """
    mean, square = float(differences.mean()), 0.0
    for means in (differences.mean(axis=0), differences.mean(axis=1)):
        if len(means) > 1:
            square += stats.t.ppf((1 + LEVEL) / 2, len(means) - 1) ** 2 * means.var(ddof=1) / len(means)
    half = float(np.sqrt(square))
    return Interval(mean, mean - half, mean + half)


def at_equal_seconds(results: Results, arm: str, other: str, units: pd.DataFrame) -> Interval | None:
    """The difference of two arms at equal seconds, in points, with the error of the unit times in the interval.

    Args:
        units: As `Records.units` returns them. Only rounds that have both arms count.

    Returns:
        None without a round, or with fewer than two pairs.
    """
    timed_as = [PRICED_AS.get(name, name) for name in (arm, other)]
    differences = []
    for _, of_round in units.groupby("round"):
        if set(timed_as) <= set(of_round["arm"]):
            set_costs(results, of_round.set_index("arm")[["response", "update"]])
            both = heights(results, arm, other, "cost/seconds")
            differences.append(100 * (both[arm] - both[other]).to_numpy())
    if not differences or len(differences[0]) < 2:
        return None
    return crossed_interval(np.array(differences, dtype=float))


def gains(results: Results, units: pd.DataFrame) -> pd.DataFrame:
    """Each arm minus GRPO or PPO, and the pairs of BEYOND, at each cost.

    Returns:
        A row for each: label, than, path, cost, pairs, and gain, low and high in points.
    """
    rows = []
    for path in results.paths:
        plain, *others = results.arms_of_path(path)
        pairs = [(arm.name, plain.name) for arm in others]
        pairs += [(f"{arm}-{path}", f"{other}-{path}") for arm, other in BEYOND]
        for arm, other in pairs:
            if {arm, other} <= set(results.labels):
                names = {"label": results.labels[arm], "than": results.labels[other], "path": path}
                rows += [names | row for row in at_each_cost(results, arm, other, units)]
    return pd.DataFrame(rows).rename(columns={"value": "gain"})


def at_one_rate(results: Results) -> pd.DataFrame:
    """The arms with the rate ONE_RATE, each minus GRPO with this rate, and BAPO minus filter only.

    Returns:
        A row for each and each of COLUMNS: label, than, cost, pairs, and gain, low and high in points.
    """
    arms = {method_of(arm): arm.name for arm in results.arms_of_path("group") if arm.flags.get(RATE) == ONE_RATE}
    rows = []
    for method, other in [*((method, PLAIN) for method in arms if method != PLAIN), ("bapo", "filter_only")]:
        if {method, other} <= set(arms):
            names = {"label": results.labels[arms[method]], "than": results.labels[arms[other]]}
            rows += [names | row for row in at_each_cost(results, arms[method], arms[other])]
    return pd.DataFrame(rows).rename(columns={"value": "gain"})


def beside_free(results: Results) -> pd.DataFrame:
    """GRPO priced as if it had not trained on groups without a signal, and each arm minus it, at equal tokens.

    Such groups have no gradient, so this GRPO has the same learning curve at a lower price (`with_free_groups`).

    Returns:
        A row for each: label, than, pairs, and gain, low and high in points.
    """
    both = with_free_groups(results)
    discount(both, PRICED_AS)
    arms = both.arms_of_path("group")
    free = next(arm for arm in arms if arm.method == FREE)
    pairs = [(free, arms[0]), *((arm, free) for arm in arms[1:] if arm is not free)]
    rows = []
    for arm, than in pairs:
        sides = heights(both, arm.name, than.name, COLUMNS["tokens"])
        if len(sides) > 1:
            interval = mean_interval(100 * (sides[arm.name] - sides[than.name]))
            rows.append({"label": both.labels[arm.name], "than": both.labels[than.name], "pairs": len(sides),
                         "gain": interval.value, "low": interval.low, "high": interval.high})  # fmt: skip
    return pd.DataFrame(rows)


def at_each_cost(
    results: Results, arm: str, other: str, units: pd.DataFrame | None = None
) -> Iterator[dict[str, object]]:
    """The difference of two arms at each cost at which they have two pairs: cost, pairs, and an interval in points.

    Args:
        units: As `Records.units` returns them. Without it, seconds are left out.
    """
    for cost, column in COLUMNS.items():
        both = heights(results, arm, other, column)
        if len(both) > 1:
            interval = crossed_interval(100 * (both[arm] - both[other]).to_numpy()[None])
            yield {"cost": cost, "pairs": len(both), **interval._asdict()}
    if units is not None and (timed := at_equal_seconds(results, arm, other, units)):
        yield {"cost": "seconds", "pairs": len(both), **timed._asdict()}


def forms_of_x2(records: Records) -> pd.DataFrame:
    """What BAPO with each form of X2 solves of the never solved problems, minus BAPO without X2.

    Returns:
        A row for each that has two pairs, if all runs of both are counted: method, pairs, and gain, low and high in
        points.
    """
    solved = pd.concat([records.solved(stage) for stage in ("hard", "hard_more")]).unstack(0)
    rows = []
    for method in FORMS_OF_X2:
        arms = (f"{method}-group", "without_x2-group")
        if not all(records.counted(stage, arm) for stage in ("hard", "hard_more") for arm in arms):
            continue
        both = solved.reindex(columns=arms).dropna()
        if len(both) > 1:
            interval = mean_interval(100 * (both.iloc[:, 0] - both.iloc[:, 1]))
            rows.append({"method": method, "pairs": len(both), "gain": interval.value, "low": interval.low,
                         "high": interval.high})  # fmt: skip
    return pd.DataFrame(rows)


def searches(root: Path, stages: Sequence[Stage]) -> pd.DataFrame:
    """What the searches that have ended have found.

    Returns:
        A row for each method and rate: stage, method, rate, the height by which it is judged, whether it is taken, and,
        if its runs are kept, the heights of all. In the study that decides, also whether the rule that was committed
        first would take it.
    """
    rows = []
    for stage in stages:
        for method in stage.seconds if stage.grid else ():
            search = search_of(stage, method, root)
            runs = heights_of_seeds(stage, method, search.rates, root) if search.heights and search.rates else {}
            first = choose({rate: np.mean(each) for rate, each in runs.items()}, FIRST_NEAR) if runs else None
            for rate, height in search.heights.items() if search.heights else ():
                rows.append({
                    "stage": stage.name, "method": method, "rate": rate, "height": 100 * height,
                    "": taken(stage, search.heights, rate),
                    "runs": ", ".join(f"{100 * each:.1f}" for each in runs.get(rate, ())),
                    **({} if stage.by_mean else {"first rule": "taken" if rate == first else ""}),
                })  # fmt: skip
    return pd.DataFrame(rows)


def taken(stage: Stage, by_rate: Mapping[float, float], rate: float) -> str:
    """Whether a search takes a rate, and, if it adds none, whether that is at an end of its grid."""
    if rate != chosen_of(stage, by_rate):
        return ""
    at_end = stage.by_mean and rate in (stage.grid[0], stage.grid[-1])
    return "taken, at an end of the grid" if at_end else "taken"


def ended_before(records: Records) -> pd.DataFrame:
    """How many runs of the stage `runs` had ended before each time of CHANGED: a row for each."""
    ends = [record.read_summary(run.folder).get("finished", "") for run in records.runs(stage_of("runs"))]
    return pd.DataFrame([
        {"changes were": what, "at": moment, "runs that had ended": sum("" < end < moment for end in ends)}
        for what, moment in CHANGED.items()
    ])  # fmt: skip


# ── updates ──


def updates(results: Results) -> pd.DataFrame:
    """How an arm updates its policy, means over the steps of its runs that made an update.

    Returns:
        A row for each arm: label, rate; loss scale, the share of the tokens in an update whose group has a signal, by
        which the others divide the gradient, and nothing where groups with equal rewards have a gradient (with a
        critic, and HELPED); gradient norm, the median before clipping; clipped steps, the share of steps whose norm is
        above `actor.max_norm`; clipped tokens, the share that the PPO clip takes out; and steps, optimizer steps for
        1,000 responses.
    """
    steps = results.steps.set_index([*RUN, "step"])
    useless, left_out = (
        groups.groupby([*RUN, "step"])["tokens"].sum().reindex(steps.index, fill_value=0.0)
        for groups in (without_signal(results), skipped(results))
    )
    optimizer = optimizer_steps(results).set_index("label")["optimizer_steps"]
    rows = []
    for arm in results.arms:
        label, config = results.labels[arm.name], results.by_arm[arm.name][0].run.config
        of_arm = steps.loc[arm.name]
        signal = of_arm["tokens/trained"] - useless.loc[arm.name]
        of_signal = signal / (of_arm["tokens/trained"] + left_out.loc[arm.name])
        scale = of_signal[of_arm["tokens/trained"] > 0].mean()
        norms = of_arm["actor_grad_norm"].dropna()
        rows.append({
            "label": label, "rate": config["actor.adam.lr"],
            "loss scale": np.nan if arm.path == "critic" or arm.method in HELPED else scale,
            "gradient norm": norms.median(), "clipped steps": (norms > config["actor.max_norm"]).mean(),
            "clipped tokens": of_arm["ppo_clip_ratio"].mean(), "steps": optimizer[label],
        })  # fmt: skip
    return pd.DataFrame(rows)


def critics(records: Records) -> pd.DataFrame:
    """What the critics of part 3 explain of the variance of the returns: a row for each run of a stage."""
    rows = [
        {"stage": stage.name, "label": run.arm.label, "seed": run.seed, "explained": explained(run)}
        for stage in STAGES
        if stage.climb or stage.settings_from
        for run in records.runs(stage)
    ]
    return pd.DataFrame(rows)


# ── the page ──


def picture(shares: pd.DataFrame) -> alt.LayerChart:
    """Gain over GRPO by the share of generation: a line for each of DRAWN, with its interval."""
    wanted = shares[shares["label"].isin(DRAWN)]
    colours = alt.Scale(domain=list(DRAWN), range=list(DRAWN.values()))
    legend = alt.Legend(orient="top", columns=2, columnPadding=24, symbolOpacity=1, labelLimit=0)
    base = alt.Chart(wanted).encode(
        x=alt.X("share:Q", title="share of generation in a step of GRPO", axis=alt.Axis(format="%")),
        color=alt.Color("label:N", title=None, scale=colours, legend=legend),
    )
    spread = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title="gain over GRPO, points (95 %)"), y2="high:Q")
    zero = alt.Chart(wanted).mark_rule(strokeDash=[4, 4], color=MUTED).encode(y=alt.datum(0))
    return alt.layer(zero, spread, base.mark_line(strokeWidth=2).encode(y="gain:Q")).properties(width=350, height=260)


def page(tables: Mapping[str, pd.DataFrame], title: str, name: str, script: str = "decision.py") -> str:
    """The tables as one page of Markdown.

    Args:
        name: Its design is NAME_design.md.
        script: The script that makes it, with its arguments.
    """
    source = (
        f"Made by `python research/{script}`. [The design](../../{name}_design.md) has the questions and the words."
    )
    parts = [f"# {title}", f"{source} Gains are in points, with 95 % intervals."]
    for heading, table in tables.items():
        if not table.empty:
            if "rate" in table:  # too small for three digits behind the point
                table = table.assign(rate=table["rate"].map("{:g}".format))
            texts = [number for number, name in enumerate(table) if name == "rate"]
            parts += [f"## {heading}", table.round(3).to_markdown(index=False, disable_numparse=texts)]
    return "\n\n".join(parts) + "\n"


def tables_of(records: Records) -> dict[str, pd.DataFrame]:
    """The tables of the page by their titles, of the stages that have runs."""
    units, comparisons = records.units(), primary(records)
    tables = {
        "Primary comparisons": comparisons,
        "What the primary comparisons could see": power(comparisons, ALPHA),
        "Learning rates": searches(records.root, STAGES),
    }
    for stage in ("runs", "hard", "critic"):
        results = records.results(stage)
        if results is None or not records.over(stage):
            continue
        plain = "PPO" if stage == "critic" else "GRPO"
        tables[f"Gain over {plain} ({stage})"] = gains(results, units if stage == "runs" else units.iloc[:0])
        if stage != "critic":
            tables[f"Beside GRPO whose groups without a signal are free ({stage})"] = beside_free(results)
        tables[f"Updates ({stage})"] = updates(results)
        tables[f"X2 and X3 ({stage})"] = doses(results)
    if (results := records.results("runs")) is not None:
        tables["At one rate (runs)"] = at_one_rate(results)
        tables["Variance of rewards between prompts (runs)"] = between_prompts(results)
        tables["Gain by the share of generation"] = by_share(results)
        tables["Runs that had ended when the design was changed"] = ended_before(records)
    tables["What the critic explains"] = critics(records)
    tables["Unit times"] = units
    for stage in ("hard", "hard_more"):
        solved = records.solved(stage)
        if not solved.empty and records.over(stage):
            shares = (100 * solved.unstack(0)).rename_axis("seed").reset_index()
            if (again := records.root / AGAIN / SOLVED).is_file():
                counts = json.loads(again.read_bytes())
                shares["base model, asked again"] = 100 * counts["solved"] / counts["of"]
            tables[f"Solved of the never solved ({stage})"] = shares
    tables["Solved, less BAPO without X2 (hard)"] = forms_of_x2(records)
    return tables | age_or_distance.tables(records.probes())


def main(argv: Sequence[str] | None = None) -> int:
    """Read the runs, and write the page, its tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="worktree of the runs; without it, the kept records"
    )
    parser.add_argument("--keep", action="store_true", help="keep the records of the runs")
    given = parser.parse_args(argv)
    if given.keep and given.runs is None:
        parser.error("--keep needs --runs, because the kept records are kept already")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with kept() if given.runs is None else given_folder(given.runs) as root:
        if given.keep:
            keep_all(root)
        tables = tables_of(Records(root))
    text = page(tables, "Replay, the filter or larger steps: the numbers", "decision")
    (FOLDER / "decision.md").write_text(text, encoding="utf-8")
    shares = tables.get("Gain by the share of generation", pd.DataFrame())
    if not shares.empty:
        save_svg(picture(shares), DOCS_IMAGES / "decision_shares.svg")
    print(tables["Primary comparisons"].round(3).to_markdown(index=False))
    return 0


@contextmanager
def kept(trial: str = "decision") -> Iterator[Path]:
    """A folder with the kept records of a study, in the form of a project's folder."""
    with tempfile.TemporaryDirectory() as name:
        unpack(Path(name), trial)
        yield Path(name)


@contextmanager
def given_folder(folder: Path) -> Iterator[Path]:
    """A folder as it is, in the form of `kept`."""
    yield folder.resolve()


if __name__ == "__main__":
    raise SystemExit(main())

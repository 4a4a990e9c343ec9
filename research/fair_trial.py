"""What the runs of fair_trial_design.md, critic_design.md or reuse_design.md say.

The page has the primary comparisons, gains at each cost, and what the batches held.

    python research/fair_trial.py                # the kept records; writes results/fair/ and the figure
    python research/fair_trial.py --runs ../fair --keep  # keeps the records of the runs in another worktree first
    python research/fair_trial.py --trial critic # the same of critic_design.md; writes results/critic/. Or: reuse
    python research/fair_trial.py --power        # what the comparisons can see, from the kept runs of the first study

No number of a stage is shown before all of its runs have ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import altair as alt
import numpy as np
import pandas as pd
from decision import (
    ALPHA,
    COLUMNS,
    NOT_TESTED,
    NOT_YET,
    Interval,
    Records,
    answer,
    kept,
    page,
    searches,
    set_costs,
    updates,
)
from decision_stages import EXPLAINED, best_method, explained, stage_of, stages_of
from dose import weighted
from folders import DOCS_IMAGES
from kept_records import folder_of, keep_all
from replay_map import GENERATED, SHARES, optimizer_steps, priced
from scipy import stats

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.colours import MUTED, PALETTE
from bapo_openrlhf.workbench.pages.figure import save_svg
from bapo_openrlhf.workbench.report.runs import TRIPPED
from bapo_openrlhf.workbench.study.data import UPDATE_TOKENS, Results
from bapo_openrlhf.workbench.study.statistics import LEVEL, holm

DRAWS = 99_999  # permutations, if there are more
COUNTS = 3.0  # points: the smallest difference that counts, as in decision_design.md
EXPENSIVE = 0.95  # share of generation in a step of GRPO, where generation is expensive
COSTS = (*COLUMNS, "seconds", f"share {EXPENSIVE}")
TIMED = {"recipe": "recipe_units"}  # stages with unit times, and the stage that measures them
BEST = "best replay"  # stands for the replay method that the search found to be the best
BETTER = "better critic"  # stands for the one of CRITICS whose runs are the highest, by their mean
CRITICS = ("generated", "grouped")
GATED = "ended by the gate, %"
CHOICES = {BETTER: len(CRITICS)}  # p is multiplied by the number of arms from which the better one was chosen
BASELINES = {  # the arms over which the page has the gains of the others
    "recipe": ["plain"], "shape": ["filter_only", "matched"], "price": ["four_epochs", "two_epochs"],
    "smollm2": ["plain"], "critic_arms": ["today"], "prefixes": ["wide"], "gate": [],
}  # fmt: skip
# Titles of the pages, and the names of their files and designs.
PAGES = {
    "fair": ("A fair trial for replay: the numbers", "fair_trial"),
    "critic": ("A critic that knows something: the numbers", "critic"),
    "reuse": ("Old responses, new tokens: the numbers", "reuse"),
}


class Comparison(NamedTuple):
    """A primary comparison. Those of one stage are a family for Holm's correction.

    Attributes:
        question: What it answers.
        stage: The stage whose runs are compared.
        better, than: Methods. The height of the second is subtracted from that of the first.
        cost: What is equal, one of COSTS.
    """

    question: str
    stage: str
    better: str
    than: str
    cost: str


PRIMARY = (
    Comparison("Is the recipe ahead of GRPO?", "recipe", "recipe", "plain", "tokens"),
    Comparison("Is the recipe ahead of BAPO?", "recipe", "recipe", "bapo", "tokens"),
    Comparison("Is the recipe ahead of GRPO on the clock?", "recipe", "recipe", "plain", "seconds"),
    Comparison("Does replay add to the filter?", "shape", "wide", "filter_only", "responses"),
    Comparison("Does it add more than its updates do?", "shape", "wide", "matched", "responses"),
    Comparison("Is replay worth more than four epochs?", "price", BEST, "four_epochs", f"share {EXPENSIVE}"),
    Comparison("Is replay worth more than two epochs?", "price", BEST, "two_epochs", f"share {EXPENSIVE}"),
    Comparison("Does a critic of all groups help?", "critic_arms", "generated", "control", "tokens"),
    Comparison("Does it help to use it only if it knows more?", "critic_arms", "grouped", "generated", "tokens"),
    Comparison("Is a critic ahead of none?", "critic_arms", BETTER, "group_relative", "tokens"),
    Comparison("Do prefixes help re-evaluation?", "prefixes", "prefixes", "wide", "responses"),
)  # fmt: skip


# ── two samples ──


def welch(first: np.ndarray, second: np.ndarray, axis: int = -1) -> np.ndarray:
    """Welch's t: the difference of the means in units of its standard error."""
    square = sum(sample.var(axis=axis, ddof=1) / sample.shape[axis] for sample in (first, second))
    return (first.mean(axis=axis) - second.mean(axis=axis)) / np.sqrt(square)


def permutation_p(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sided p of the permutation test of two samples, with Welch's t, so that their spreads may differ.

    All permutations are counted if there are at most DRAWS; otherwise DRAWS are drawn.
    """
    test = stats.permutation_test(
        (first, second), welch, vectorized=True, n_resamples=DRAWS, batch=10_000, random_state=np.random.default_rng(0)
    )
    return float(test.pvalue)


def difference(first: np.ndarray, second: np.ndarray) -> Interval:
    """The difference of the means of two arms, with its 95 % interval, over rounds of unit times.

    The interval has the half widths of two intervals in quadrature: Welch's, of the runs' means over the rounds, and
    Student's, of the rounds. With one round it is Welch's.

    Args:
        first, second: Shape (rounds, runs), with at least two runs.
    """
    runs = first.mean(axis=0), second.mean(axis=0)
    interval = stats.ttest_ind(*runs, equal_var=False).confidence_interval(LEVEL)
    gain, square = runs[0].mean() - runs[1].mean(), ((interval.high - interval.low) / 2) ** 2
    of_rounds = first.mean(axis=1) - second.mean(axis=1)
    if len(of_rounds) > 1:
        quantile = stats.t.ppf((1 + LEVEL) / 2, len(of_rounds) - 1)
        square += quantile**2 * of_rounds.var(ddof=1) / len(of_rounds)
    half = float(np.sqrt(square))
    return Interval(float(gain), float(gain) - half, float(gain) + half)


def samples(
    results: Results, better: str, than: str, cost: str, units: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray] | None:
    """The heights of two arms up to an equal cost, in points, each of shape (rounds of unit times, runs).

    Args:
        better, than: Names of arms.
        units: As `Records.units` returns them, for equal seconds. Only rounds that have both arms count.

    Returns:
        None with fewer than two runs of an arm, or without a round of unit times.
    """
    sides = [sides_of(results, better, than, column) for column in columns(results, better, than, cost, units)]
    if not sides or min(len(side) for both in sides for side in both) < 2:
        return None
    first, second = (100 * np.array([both[place] for both in sides]) for place in (0, 1))
    return first, second


def columns(results: Results, better: str, than: str, cost: str, units: pd.DataFrame) -> Iterator[str]:
    """Prepare the running total of a cost, and yield its column: once for each round of unit times, else once."""
    if cost in COLUMNS:
        yield COLUMNS[cost]
    elif cost == "seconds":
        for _, of_round in units.groupby("round"):
            if {better, than} <= set(of_round["arm"]):
                set_costs(results, of_round.set_index("arm")[["response", "update"]])
                yield "cost/seconds"
    else:
        yield priced(results, float(cost.removeprefix("share ")))


def sides_of(results: Results, better: str, than: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Heights of the learning curves of two arms up to the same cost, a value for each run."""
    curves = results.curve([better, than], column)
    first, second = (curves[curves.index.get_level_values("arm") == arm].to_numpy() for arm in (better, than))
    return first, second


# ── records ──


def fresh(results: Results) -> Results:
    """The same runs, with the mean reward of the fresh responses of each step in the place of the evaluations.

    These rewards are those of the policy before the step, so they stand at the step before.
    """
    runs = [
        replace(run, run=replace(run.run, evaluations=[
            {"step": row["step"] - 1, "eval_fresh_pass1": row["reward/fresh_mean"]}
            for row in run.run.rows if row.get("reward/fresh_mean") is not None]))
        for run in results.runs
    ]  # fmt: skip
    other = Results(replace(results.study, evaluations=("fresh",), start=None), runs)
    set_costs(other)
    return other


def named(records: Records, comparison: Comparison) -> list[str]:
    """The names of both arms."""
    results, methods = records.results(comparison.stage), [comparison.better, comparison.than]
    if BEST in methods:
        methods[methods.index(BEST)] = best_method(stage_of(comparison.stage), records.root)
    arms = {arm.method: arm.name for arm in results.arms}
    if BETTER in methods:
        both = sides_of(results, *(arms[method] for method in CRITICS), COLUMNS[comparison.cost])
        methods[methods.index(BETTER)] = CRITICS[int(np.argmax([side.mean() for side in both]))]
    return [arms[method] for method in methods]


def over(records: Records, stage: str) -> bool:
    """Whether all runs of a stage have ended, and those that measure its unit times."""
    return records.over(stage) and (stage not in TIMED or records.over(TIMED[stage]))


def units_of(records: Records, stage: str) -> pd.DataFrame:
    """The unit times of a stage; without a row if none are measured."""
    name = TIMED.get(stage)
    return records.units(name) if name else pd.DataFrame(columns=["arm", "round", "response", "update"])


# ── tables ──


def comparisons(trial: str) -> list[Comparison]:
    """The primary comparisons of a study."""
    return [comparison for comparison in PRIMARY if stage_of(comparison.stage).trial == trial]


def primary(records: Records, trial: str) -> pd.DataFrame:
    """The primary comparisons of a study.

    Returns:
        A row for each: question, stage, better, than, cost, gain, low and high (points), p, p_holm, and answer. If
        `better` was chosen among several arms by its runs, p is multiplied by their number.
    """
    rows = []
    for comparison in comparisons(trial):
        row: dict[str, object] = {**comparison._asdict()}
        if over(records, comparison.stage) and (results := records.results(comparison.stage)):
            arms = named(records, comparison)
            row |= {"better": results.labels[arms[0]], "than": results.labels[arms[1]]}
            if both := samples(results, *arms, comparison.cost, units_of(records, comparison.stage)):
                p = CHOICES.get(comparison.better, 1) * permutation_p(*(side.mean(axis=0) for side in both))
                row |= gain_of(both) | {"p": min(p, 1.0)}
        rows.append(row)
    table = pd.DataFrame(rows, columns=[*Comparison._fields, "gain", "low", "high", "p"])
    table["p_holm"] = table.groupby("stage")["p"].transform(lambda p: holm(p.fillna(1.0))).where(table["p"].notna())
    table["answer"] = [
        answer({**row, "counts": COUNTS}) if row["p"] == row["p"]
        else NOT_TESTED if over(records, row["stage"]) else NOT_YET
        for row in table.to_dict("records")
    ]  # fmt: skip
    return table


def gain_of(both: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """gain, low and high of `difference`."""
    return dict(zip(("gain", "low", "high"), difference(*both), strict=True))


def gains(results: Results, baseline: str, units: pd.DataFrame) -> pd.DataFrame:
    """Each arm minus a baseline at each cost, by evaluations and by fresh rewards. Nothing is claimed from it."""
    rows = []
    for outcome, read in (("evaluation", results), ("fresh rewards", fresh(results))):
        for arm, cost in product(others(results, baseline), COSTS):
            if both := samples(read, arm, baseline, cost, units):
                rows.append({"label": results.labels[arm], "outcome": outcome, "cost": cost, **gain_of(both)})
    return pd.DataFrame(rows)


def gains_by_share(results: Results, baseline: str) -> pd.DataFrame:
    """Each arm minus a baseline, by the share of generation in a step of GRPO. Nothing is claimed from it."""
    rows = []
    for arm, share in product(others(results, baseline), sorted({*SHARES[::5], EXPENSIVE})):
        if both := samples(results, arm, baseline, f"share {share}", pd.DataFrame()):
            rows.append({"label": results.labels[arm], "share": share, **gain_of(both)})
    return pd.DataFrame(rows)


def others(results: Results, baseline: str) -> list[str]:
    """The names of all arms with runs but the baseline."""
    return [arm.name for arm in results.arms if arm.name != baseline]


def batches(results: Results) -> pd.DataFrame:
    """What the batches of each arm held, means over its runs.

    Returns:
        A row for each arm: label; responses and updates (optimizer steps) of a run; the updates up to as many responses
        as all arms have; train.batch_size; tokens trained on for a generated one; groups of a trainer step; the shares
        of X2, X3 and groups with a prefix in these, in per cent; steps from the last group of a prompt to its X2; the
        age of X3, in trainer steps and in optimizer steps; the TV distances of fresh groups, X2 and X3 from today's
        policy, each group counted once; and the share of the steps whose reuse a gate has ended, in per cent. Without
        any group with a prefix, or any gate, their columns are left out.
    """
    rate = optimizer_steps(results).set_index("label")["optimizer_steps"]
    least = results.numbers["rollouts"].min()
    rows = []
    for arm in results.arms:
        steps, label = results.steps[results.steps["arm"] == arm.name], results.labels[arm.name]
        sources = ("fresh", "reevaluated", "replayed", "prefixed")
        x1, x2, x3, prefixed = (steps[f"groups/{source}"].fillna(0) for source in sources)
        runs, trained = len(results.by_arm[arm.name]), (x1 + x2 + x3 + prefixed).sum()
        responses, age = steps["rollouts/step"].sum() / runs, weighted(steps, "staleness/replayed_steps_mean", x3)
        updates, last = rate[label] * responses / 1000, steps.groupby("seed")[[UPDATE_TOKENS, GENERATED]].last().sum()
        rows.append({
            "label": label, "responses": responses, "updates": updates,
            "updates, equal responses": rate[label] * least / 1000,
            "batch size": results.by_arm[arm.name][0].run.config["train.batch_size"],
            "trained, per token": last[UPDATE_TOKENS] / last[GENERATED],
            "groups": trained / len(steps), "X2, %": 100 * x2.sum() / trained, "X3, %": 100 * x3.sum() / trained,
            "with a prefix, %": 100 * prefixed.sum() / trained,
            "wait of X2": waits(results, arm.name), "age of X3": age,
            "age of X3, updates": age * updates * runs / len(steps),
            "TV X1": weighted(steps, "tv/fresh", x1), "TV X2": weighted(steps, "tv/reevaluated", x2),
            "TV X3": weighted(steps, "tv/replayed", x3),
            GATED: 100 * (steps[TRIPPED] > 0).mean() if TRIPPED in steps else np.nan,
        })  # fmt: skip
    table = pd.DataFrame(rows)
    there = {"with a prefix, %": table["with a prefix, %"].any(), GATED: table[GATED].notna().any()}
    return table.drop(columns=[name for name, is_there in there.items() if not is_there])


def waits(results: Results, arm: str) -> float:
    """Steps from the last group of a prompt to the one that is trained on as X2, the mean; nan without any."""
    tables = [run.run.groups.assign(seed=run.seed) for run in results.by_arm[arm] if not run.run.groups.empty]
    if not tables:
        return np.nan
    groups = pd.concat(tables)
    generated = groups[groups["source"].isin(["fresh", "reevaluated"])].sort_values(["seed", "step"], kind="stable")
    wait = generated["step"] - generated.groupby(["seed", "prompt"])["step"].shift()
    return float(wait[generated["state"] == "reevaluated"].mean())


def asked_again(results: Results) -> pd.DataFrame:
    """How many groups a step asks for again, without and with a prefix: means over the steps of each arm.

    Returns:
        A row for each arm: label; groups of a step without and with a prefix, without those that are cut; and of those
        with one, the mean reward and the share whose rewards are all equal, in per cent. It is empty if no group has a
        prefix.
    """
    rows = []
    for arm in results.arms:
        steps = results.steps[results.steps["arm"] == arm.name]
        states = ("reevaluated", "unimproved", "solved", "prefixed", "unsteered")
        groups = steps.reindex(columns=[f"groups/{state}" for state in states]).fillna(0).set_axis(states, axis=1)
        prefixed = groups["prefixed"] + groups["unsteered"]
        rows.append({
            "label": results.labels[arm.name],
            "without a prefix": groups[["reevaluated", "unimproved", "solved"]].sum(axis=1).mean(),
            "with a prefix": prefixed.mean(),
            "their mean reward": weighted(steps, "prefix/mean_reward", prefixed),
            "all equal, %": 100 * groups["unsteered"].sum() / (prefixed.sum() or np.nan),
        })  # fmt: skip
    table = pd.DataFrame(rows)
    return table if table["with a prefix"].any() else table[:0]


def machines(records: Records, stage: str) -> pd.DataFrame:
    """Runs of each arm by the kind of CPU."""
    rows = [{"label": run.arm.label, "cpu": run.run.metadata.get("cpu")} for run in records.results(stage).runs]
    return pd.DataFrame(rows).value_counts().rename("runs").reset_index()


def critic_updates(rows: Sequence[Mapping[str, float]], config: Mapping[str, object]) -> int:
    """Optimizer steps of the critic of a run after value pretraining.

    A critic of all groups trains on what a step generated and on the replayed groups, which are whole.

    Args:
        rows: Metrics of all steps.
        config: The flags of the run, by name.
    """
    size, of_group = int(config["train.batch_size"]), int(config["rollout.n_samples_per_prompt"])
    of_all = config.get("adapt.critic_groups") == "generated"
    trained = [
        row["rollouts/step"] + of_group * row["groups/replayed"] if of_all else row["responses/trained"] for row in rows
    ]
    return config.get("adapt.critic_epochs", 1) * sum(-(-int(responses) // size) for responses in trained)


def known(records: Records, stage: str) -> pd.DataFrame:
    """What the critic of each run explains of the returns that it trains on, and of X1's; and its `critic_updates`."""
    rows = []
    for run in records.runs(stage_of(stage)):
        if run.arm.path == "critic":
            config = record.read_run(run.folder)["config"]
            metric = f"{EXPLAINED}_generated" if config.get("adapt.critic_groups") == "generated" else EXPLAINED
            rows.append({
                "label": run.arm.label, "seed": run.seed, "explained": explained(run, metric),
                "of X1": explained(run, f"{EXPLAINED}_fresh"),
                "updates": critic_updates(record.read_metrics(run.folder), config),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=["label", "seed", "explained", "of X1", "updates"])


def tables_of(records: Records, trial: str) -> dict[str, pd.DataFrame]:
    """The tables of a study's page by their titles, of the stages that have ended."""
    stages = [stage for stage in stages_of(trial) if records.over(stage.name)]
    tables = {"Primary comparisons": primary(records, trial), "Learning rates": searches(records.root, stages)}
    for stage in stages:
        if trial == "critic" and not (table := known(records, stage.name)).empty:
            tables[f"What the critic explains ({stage.name})"] = table
    for stage, baselines in BASELINES.items():
        if stage_of(stage).trial != trial or not over(records, stage) or (results := records.results(stage)) is None:
            continue
        for than in (arm.name for arm in results.arms if arm.method in baselines):
            label = results.labels[than]
            tables[f"Gain over {label} ({stage})"] = gains(results, than, units_of(records, stage))
            tables[f"Gain over {label} by the share of generation ({stage})"] = gains_by_share(results, than)
        tables[f"Batches ({stage})"] = batches(results)
        if not (table := asked_again(results)).empty:
            tables[f"Groups asked again in a step ({stage})"] = table
        tables[f"Updates ({stage})"] = updates(results)
        tables[f"Machines ({stage})"] = machines(records, stage)
        if stage in TIMED:
            tables[f"Unit times ({stage})"] = units_of(records, stage)
            tables[f"Machines ({TIMED[stage]})"] = machines(records, TIMED[stage])
    return tables


def picture(comparisons: pd.DataFrame) -> alt.LayerChart:
    """The gain of each primary comparison that is answered, with its interval, beside the differences that count."""
    rows = comparisons[comparisons["gain"].notna()]
    costs = {f"share {EXPENSIVE}": f"generation {EXPENSIVE:.0%} of the price"}
    words = [costs.get(row.cost, f"equal {row.cost}") for row in rows.itertuples()]
    rows = rows.assign(pair=rows["better"] + " - " + rows["than"] + ", " + words)
    base = alt.Chart(rows).encode(y=alt.Y("pair:N", title=None, sort=None, axis=alt.Axis(labelLimit=0)))
    none = alt.Chart(pd.DataFrame([{"low": -COUNTS, "high": COUNTS}])).mark_rect(color=MUTED, opacity=0.15)
    zero = alt.Chart(rows).mark_rule(strokeDash=[4, 4], color=MUTED).encode(x=alt.datum(0))
    interval = base.mark_rule(strokeWidth=2, color=PALETTE[0]).encode(x="low:Q", x2="high:Q")
    title = "difference in points of accuracy (95 %); grey: less than counts"
    gain = base.mark_point(filled=True, size=80, opacity=1, color=PALETTE[0]).encode(x=alt.X("gain:Q", title=title))
    layers = alt.layer(none.encode(x="low:Q", x2="high:Q"), zero, interval, gain)
    return layers.properties(width=350, height=alt.Step(28))


# ── what the comparisons can see ──


def detectable(spread: tuple[float, float], runs: int, comparisons: int, chance: float = 0.8) -> float:
    """The true difference, in points, that is found with a chance of `chance` as the first one of its family.

    For normal heights and Welch's test, whose p is nearly that of the permutation test.

    Args:
        spread: Standard deviations of the heights of both arms.
        runs: Runs of each arm.
        comparisons: Those of the family.
    """
    squares = np.square(spread) / runs
    error, degrees = np.sqrt(squares.sum()), squares.sum() ** 2 / (squares**2 / (runs - 1)).sum()
    limit = stats.t.ppf(1 - ALPHA / comparisons / 2, degrees)
    low, high = 0.0, 20.0 * error
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if stats.nct.sf(limit, degrees, middle / error) >= chance else (middle, high)
    return float(high)


def spreads(results: Results, methods: Sequence[str], cost: str) -> dict[str, float]:
    """Standard deviations over seeds of the heights of arms up to an equal cost of all, in points."""
    arms = [f"{method}-group" for method in methods]
    curves = results.curve(arms, next(columns(results, *arms[:2], cost, pd.DataFrame())))
    return {method: 100 * float(curves[arm].std(ddof=1)) for method, arm in zip(methods, arms, strict=True)}


def power(records: Records) -> pd.DataFrame:
    """What the primary comparisons can see, if heights vary as those of the nearest arms of decision_design.md.

    Args:
        records: The kept runs of decision_design.md.
    """
    results = records.results("runs")
    near = {  # a comparison's arms, and the nearest arms of that study
        ("recipe", "plain"): ("half", "plain"), ("recipe", "bapo"): ("half", "without_x2"),
        ("wide", "filter_only"): ("without_x2", "filter_only"), ("wide", "matched"): ("without_x2", "filter_only"),
        (BEST, "four_epochs"): ("replay_all", "two_epochs"), (BEST, "two_epochs"): ("replay_all", "two_epochs"),
    }  # fmt: skip
    rows = []
    for comparison in comparisons("fair"):
        runs = len(stage_of(comparison.stage).seeds)
        family = sum(other.stage == comparison.stage for other in comparisons("fair"))
        alike = near[comparison.better, comparison.than]
        cost = "tokens" if comparison.cost == "seconds" else comparison.cost
        for outcome, read in (("evaluation", results), ("fresh rewards", fresh(results))):
            spread = spreads(read, alike, cost)
            seen = detectable(tuple(spread.values()), runs, family)
            rows.append({"question": comparison.question, "outcome": outcome, "runs": runs, "arms": ", ".join(alike),
                         "sd": ", ".join(f"{one:.1f}" for one in spread.values()), "seen": seen})  # fmt: skip
    return pd.DataFrame(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the runs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", choices=PAGES, default="fair", help="the study")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="worktree of the runs; else the kept records")
    parser.add_argument("--keep", action="store_true", help="keep the records of the runs")
    parser.add_argument("--power", action="store_true", help="say what the comparisons can see, and nothing else")
    given = parser.parse_args(argv)
    if given.power:
        with kept() as root:
            print(power(Records(root)).round(1).to_markdown(index=False))
        return 0
    if given.keep and given.runs is None:
        parser.error("--keep needs --runs, because the kept records are kept already")
    folder = folder_of(given.trial)
    folder.mkdir(parents=True, exist_ok=True)
    with kept(given.trial) if given.runs is None else nullcontext(given.runs.resolve()) as root:
        if given.keep:
            keep_all(root, given.trial)
        tables = tables_of(Records(root), given.trial)
    title, name = PAGES[given.trial]
    text = page(tables, title, name, f"fair_trial.py --trial {given.trial}")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    if tables["Primary comparisons"]["gain"].count() > 1:  # a single one needs no picture
        save_svg(picture(tables["Primary comparisons"]), DOCS_IMAGES / f"{name}.svg")
    print(tables["Primary comparisons"].round(3).to_markdown(index=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

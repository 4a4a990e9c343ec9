"""Where replay pays: the studies of research/study_design.md as one table and one figure.

    python research/replay_map.py --time  # seconds of a response and of an update for drawn arms, on an idle machine
    python research/replay_map.py         # reads runs/studies; writes results/map/ and the figures of the docs
    python research/replay_map.py --keep  # the same, and keeps the records of the runs

Without the folder of a study, its records in results/map are read.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from folders import DOCS_IMAGES, RESULTS, ROOT, STUDIES
from smollm2 import keep

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.flags.sizes import batch_arithmetic
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.colours import MUTED, PALETTE
from bapo_openrlhf.workbench.pages.figure import save_svg
from bapo_openrlhf.workbench.report.runs import TRIPPED, read_run
from bapo_openrlhf.workbench.study.data import (
    ALL_SECONDS,
    DEMONSTRATIONS,
    PLAIN,
    ROLLOUTS,
    RUN,
    UPDATE_TOKENS,
    Results,
    StudyRun,
)
from bapo_openrlhf.workbench.study.definition import Arm, Study, read_study
from bapo_openrlhf.workbench.study.runner import RUNS, plan
from bapo_openrlhf.workbench.study.statistics import holm, mean_interval, sign_flip_p

FOLDER = RESULTS / "map"
SETTINGS = {  # of each study, in the order of the figure
    "map_centre": "centre",
    "map_near": "centre, first half",
    "map_near_small": "small batches",
    "map_neighbours": "small batches",
    "map_near_critic": "small batches",
    "map_critic": "small batches",
    "map_few_hard": "fewer hard prompts",
    "map_delay": "more delay",
    "map_groups": "larger groups",
    "map_tuned": "tuned",
    "map_hard": "more hard prompts",
    "smollm2_map": "SmolLM2",
}
IN_WORDS = {  # settings whose names do not explain themselves; the others are small batches with one thing changed
    "centre": "32 prompts in a step", "centre, first half": "32 prompts, first half of the run",
    "small batches": "8 prompts in a step", "tuned": "8 prompts in a step, best rate",
    "fewer hard prompts": "8 prompts, fewer of them hard", "more delay": "8 prompts, v = 8",
    "larger groups": "4 prompts of 16 responses", "more hard prompts": "8 prompts, more of them hard",
}  # fmt: skip
TIMED_AS = {"map_hard": "map_tuned", "map_delay": "map_few_hard", "map_groups": "map_few_hard", "smollm2_map": None}
TIMED = [name for name in SETTINGS if name not in TIMED_AS]  # the others take the unit times of another study, or none
TESTS = ("map_near", "map_near_small", "map_near_critic")  # the planned tests of the recipe
TESTED = "recipe"  # the method that they compare
COSTS = {"responses": ROLLOUTS, "tokens": "cost/tokens", "seconds": "cost/seconds"}  # and their columns in `steps`
GENERATED = "tokens/generated_total"
SHARE = "cost/share"  # the column for a given share of generation, see `by_share`
SHARES = [percent / 100 for percent in range(0, 101, 5)]  # of generation in a step
PRECISE = ("centre", "centre, first half", "small batches")  # settings with narrow intervals
DRAWN = ("BAPO", "BAPO without X2", "BAPO, all near groups", "DAPO")  # arms that are compared in several settings
FREE = "free"  # the method of plain OpenRLHF's runs, priced as `with_free_groups` says
SIMPLE = {  # the simplest alternatives to replay: methods, and the labels under which they are drawn
    "small": "GRPO, half of the prompts",
    "two_epochs": "GRPO, two epochs",
    FREE: "GRPO, groups without signal free",
}
REPLAY = {"recipe": "BAPO, all near groups", "without_x2": "BAPO without X2", "bapo": "BAPO"}
LINES = {  # of the figure by the share of generation: label, and colour
    **dict(zip(SIMPLE.values(), (PALETTE[6], PALETTE[0], PALETTE[2]), strict=True)),
    **dict(zip(REPLAY.values(), (PALETTE[4], PALETTE[3], PALETTE[1]), strict=True)),
}
ANSWERS = dict(zip(("ahead", "equal", "undecided", "behind"), (PALETTE[place] for place in (2, 0, 6, 1)), strict=True))
ALIKE = (12, 18)  # optimizer steps for 1,000 responses of arms that make about as many as GRPO, 15.6
EQUAL = 0.01  # arms whose interval lies within this distance of 0 are equal
STEPS, FIRST_TIMED = 20, 5  # steps of a run that measures unit times, and the first one that counts


def results_of(name: str, folder: Path) -> Results:
    """The finished runs of a study.

    Args:
        name: Name of its file in research/studies, without the ending.
        folder: The study's folder, which has its runs in `runs`.
    """
    study = read_study(STUDIES / f"{name}.yaml")
    done = [run for run in plan(study, folder) if run.done]
    return Results(study, [StudyRun(run.arm, run.seed, read_run(run.folder)) for run in done])


def add_costs(results: Results, units: pd.DataFrame | None) -> None:
    """Add running totals of tokens and seconds to the steps. The tokens of worked solutions are trained on too.

    Args:
        results: Its table `steps` gets the columns of COSTS.
        units: Index: the arm. Columns: `response` and `update`, the seconds of one. None if they are not measured.
    """
    steps = results.steps
    steps[UPDATE_TOKENS] = results.update_tokens(steps)  # computed again, because `discount` changes this column
    steps["cost/tokens"] = steps[GENERATED] + steps[UPDATE_TOKENS]
    if units is not None:
        of_arm = units.reindex(steps["arm"])
        steps["cost/seconds"] = (
            steps[ROLLOUTS] * of_arm["response"].to_numpy() + steps["step"] * of_arm["update"].to_numpy()
        )


def answer(low: float, high: float) -> str:
    """What an interval of a difference says, as in research/study_design.md."""
    if low > 0:
        return "ahead"
    if high < 0:
        return "behind"
    return "equal" if low >= -EQUAL and high <= EQUAL else "undecided"


def heights(results: Results, arm: str, other: str, column: str) -> pd.DataFrame:
    """Mean heights of the learning curves of two arms up to the same cost.

    Args:
        column: The column of `steps` with the running total of the cost.

    Returns:
        A row for each seed that both arms have, and a column for each arm. Empty if no cost was measured.
    """
    steps = results.steps
    if column not in steps or steps.loc[steps["arm"].isin([arm, other]), column].isna().any():
        return pd.DataFrame(columns=[arm, other])
    return results.curve([arm, other], column).unstack("arm").reindex(columns=[arm, other]).dropna()


def difference(results: Results, arm: str, other: str, column: str) -> dict[str, Any] | None:
    """Mean height of the learning curve of an arm, minus that of another arm, over pairs of runs with the same seed.

    Returns:
        gain, low and high (points), pairs, p (of sign flips), answer. None with fewer than two pairs.
    """
    sides = heights(results, arm, other, column)
    if len(sides) < 2:
        return None
    differences = sides[arm] - sides[other]
    interval = mean_interval(differences)
    points = {"gain": 100 * interval.value, "low": 100 * interval.low, "high": 100 * interval.high}
    verdict = {"p": sign_flip_p(differences), "answer": answer(interval.low, interval.high)}
    return {"pairs": interval.count, **points, **verdict}


def compared(results: Results, against: str = PLAIN) -> list[tuple[str, Arm, Arm]]:
    """Path, arm and other arm of each comparison with a method; plain OpenRLHF is the baseline of most tables."""
    of_path = {arm.path: arm for arm in results.arms if arm.method == against}
    return [(arm.path, arm, of_path[arm.path]) for arm in results.arms if arm.path in of_path and arm.method != against]


def gains(results: Results) -> pd.DataFrame:
    """The difference of each arm to the baseline of its path, at each cost.

    Returns:
        A row for each arm and cost that `difference` has an answer for: its fields, label and path.
    """
    rows = []
    for path, arm, plain in compared(results):
        by_cost = {cost: difference(results, arm.name, plain.name, column) for cost, column in COSTS.items()}
        columns = {"label": results.labels[arm.name], "path": path}
        rows += [{**columns, "cost": cost, **row} for cost, row in by_cost.items() if row]
    return pd.DataFrame(rows)


def pairs(results: Results) -> pd.DataFrame:
    """Each pair of runs up to the same number of responses.

    Returns:
        A row for each arm and seed: label, path, seed, height and baseline (points).
    """
    rows = []
    for path, arm, plain in compared(results):
        for seed, (height, baseline) in (100 * heights(results, arm.name, plain.name, ROLLOUTS)).iterrows():
            of_pair = {"label": results.labels[arm.name], "path": path, "seed": seed}
            rows.append({**of_pair, "height": height, "baseline": baseline})
    return pd.DataFrame(rows)


def priced(results: Results, share: float) -> str:
    """Add the running total of a cost to the steps: see `by_share`. Returns the name of its column."""
    results.steps[SHARE] = share * results.steps[GENERATED] + (1 - share) * results.steps[UPDATE_TOKENS]
    return SHARE


def by_share(results: Results, against: str = PLAIN) -> pd.DataFrame:
    """The difference of each arm to another one on its path, by how much of a step the generation takes.

    Plain OpenRLHF trains once on each token that it generates. If generation takes the share s of its step, a generated
    token costs s and one that is trained on costs 1 - s.

    Args:
        against: The method of the other arm.

    Returns:
        A row for each arm and each of SHARES: label, path, share, gain, low and high (points).
    """
    rows = []
    for share in SHARES:
        priced(results, share)
        for path, arm, other in compared(results, against):
            if row := difference(results, arm.name, other.name, SHARE):
                points = {name: row[name] for name in ("gain", "low", "high")}
                rows.append({"label": results.labels[arm.name], "path": path, "share": share, **points})
    return pd.DataFrame(rows)


def without_signal(results: Results) -> pd.DataFrame:
    """The groups that a run was trained on although all of their rewards are equal: arm, seed, step and tokens.

    A group of mean 0 to which a method adds a right response (LUFFY, AR3PO) is among them, although it has a signal.
    """
    tables = [pd.DataFrame(columns=[*RUN, "step", "tokens"]).astype({"tokens": float})]
    for study_run in results.runs:
        groups = study_run.run.groups
        if not groups.empty:
            useless = groups[(groups["state"] == "fresh") & groups["mean"].isin([0, 1])]
            tables.append(useless[["step", "tokens"]].assign(arm=study_run.arm.name, seed=study_run.seed))
    return pd.concat([table for table in tables if not table.empty] or tables)


def skipped(results: Results) -> pd.DataFrame:
    """The groups that no model passes and that count where an update divides: arm, seed, step and tokens.

    They are the groups without a signal of runs with `adapt.skip_zero_advantage`.
    """
    tables = [pd.DataFrame(columns=[*RUN, "step", "tokens"]).astype({"tokens": float})]
    for study_run in results.runs:
        groups = study_run.run.groups
        if study_run.run.config.get("adapt.skip_zero_advantage") and not groups.empty:
            silent = groups[(groups["state"] == "filtered") & groups["mean"].isin([0, 1])]
            tables.append(silent[["step", "tokens"]].assign(arm=study_run.arm.name, seed=study_run.seed))
    return pd.concat([table for table in tables if not table.empty] or tables)


def discount(results: Results, arms: Collection[str]) -> None:
    """Take the tokens of groups without a signal off what these arms have trained on.

    These groups have no gradient with group-relative advantages. Training on them only divides that of the others,
    which costs nothing.
    """
    steps = results.steps
    tokens = without_signal(results).groupby([*RUN, "step"])["tokens"].sum()
    of_step = tokens.reindex(pd.MultiIndex.from_frame(steps[[*RUN, "step"]]), fill_value=0.0).to_numpy()
    free = pd.Series(of_step * steps["arm"].isin(arms).to_numpy(), steps.index)
    for column in (UPDATE_TOKENS, "cost/tokens"):
        steps[column] -= free.groupby([steps["arm"], steps["seed"]]).cumsum()


def with_free_groups(results: Results) -> Results:
    """The same runs, and those of GRPO once more, as if it had not paid for training on groups without a signal.

    So these runs say what the filter saves, without replay.
    """
    plain = [arm for arm in results.arms if (arm.method, arm.path) == (PLAIN, "group")]
    free = {arm.name: replace(arm, method=FREE, label=SIMPLE[FREE]) for arm in plain}
    again = [replace(run, arm=free[run.arm.name]) for run in results.runs if run.arm.name in free]
    study = replace(results.study, arms=(*results.study.arms, *free.values()))
    both = Results(study, [*results.runs, *again])
    add_costs(both, None)
    discount(both, [arm.name for arm in free.values()])
    return both


def shares(results: Results) -> pd.DataFrame:
    """What `by_share` returns, with `with_free_groups`."""
    return by_share(with_free_groups(results))


def beside_simple(studies: Mapping[str, Results]) -> pd.DataFrame:
    """Arms with replay against the simplest alternatives, by the share of generation.

    Args:
        studies: Results by the study's name. Those of map_near_small and map_neighbours have the same runs of GRPO.

    Returns:
        A row for each setting, arm, alternative and share: setting, label, against, share, gain, low and high (points).
    """
    centre, near, small = (studies[name] for name in ("map_centre", "map_near_small", "map_neighbours"))
    more = [run for run in near.runs if run.arm.method in REPLAY]
    arms = (*small.study.arms, *(arm for arm in near.study.arms if arm.method in REPLAY))
    joint = Results(replace(small.study, arms=arms), [*small.runs, *more])
    tables = []
    for setting, results in (("centre", centre), ("small batches", joint)):
        both = with_free_groups(results)
        for method, label in SIMPLE.items():
            table = by_share(both, method)
            if not table.empty:
                wanted = table[table["label"].isin(REPLAY.values())].drop(columns="path")
                tables.append(wanted.assign(setting=setting, against=label))
    return joined(tables)


def confirmation(studies: Mapping[str, Results]) -> pd.DataFrame:
    """The recipe against plain OpenRLHF and DAPO at equal responses, in each study and on each path.

    Args:
        studies: Their results by name.

    Returns:
        A row for each comparison: study, path, against, the fields of `difference`, and p_holm, which is p with
        Holm's correction over all rows.
    """
    rows = []
    for study, results in studies.items():
        names = {(arm.method, arm.path): arm.name for arm in results.arms}
        for method, path in product((PLAIN, "dapo"), results.paths):
            arm, other = names.get((TESTED, path)), names.get((method, path))
            row = difference(results, arm, other, ROLLOUTS) if arm and other else None
            if row:
                rows.append({"study": study, "path": path, "against": results.labels[other], **row})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"])) if rows else table


def signal(results: Results) -> pd.DataFrame:
    """How much the generated responses can teach, and how much of that is used: the mean of m (1 - m) over responses.

    m is the mean reward of a response's group. With rewards of 0 and 1 it is the variance of the group's rewards, and a
    group without it has no group-relative advantage.

    Returns:
        A row for each arm: label, responses, generated (over all responses) and used (the same, where what is not
        trained on in its own step counts as 0).
    """
    rows = []
    for arm in results.arms:
        groups = pd.concat([run.run.groups for run in results.by_arm[arm.name]])
        variance, size = groups["mean"] * (1 - groups["mean"]), groups["responses"]
        used = groups["state"].isin(["fresh", "reevaluated"])
        rows.append({
            "label": results.labels[arm.name], "responses": int(size.sum()),
            "generated": (variance * size).sum() / size.sum(), "used": (variance * size)[used].sum() / size.sum(),
        })  # fmt: skip
    return pd.DataFrame(rows)


def optimizer_steps(results: Results) -> pd.DataFrame:
    """How many optimizer steps an arm makes for 1,000 responses that it generates.

    Returns:
        A row for each arm: label, path and optimizer_steps, which are not known (NaN) of an arm that also trains on
        worked solutions.
    """
    rows = []
    for arm in results.arms:
        steps = results.steps[results.steps["arm"] == arm.name]
        args = arguments.parse(results.study.words(arm, 1))
        of_step = steps.reindex(columns=["responses/trained", "responses/skipped", TRIPPED])
        trained = of_step["responses/trained"].fillna(batch_arithmetic(args).most_samples)  # plain OpenRLHF: all
        of_batch = np.ceil((trained + of_step["responses/skipped"].fillna(0)) / args.train.batch_size)
        tripped = of_step[TRIPPED].fillna(0)
        steps_made = (of_batch * args.train.max_epochs).where(tripped == 0, 1 / tripped - 1)
        shown = steps.reindex(columns=[DEMONSTRATIONS])[DEMONSTRATIONS]
        if shown.sum() > 0:
            steps_made = steps_made * np.nan
        rate = 1000 * steps_made.sum(skipna=False) / steps["rollouts/step"].sum()
        rows.append({"label": results.labels[arm.name], "path": arm.path, "optimizer_steps": rate})
    return pd.DataFrame(rows)


def gain_by_steps(table: pd.DataFrame, optimizer: pd.DataFrame) -> pd.DataFrame:
    """Correlation between the gain over GRPO at equal responses and the logarithm of the optimizer steps.

    Args:
        table: What `gains` returns, with the setting. The arms with small batches and without a critic count.
        optimizer: What `optimizer_steps` returns, with the setting.

    Returns:
        A row for all of these arms, and one for those whose optimizer steps are in ALIKE: arms (which), count and
        correlation.
    """
    of_arms = []
    for one in (table[table["cost"] == "responses"], optimizer):
        wanted = one[(one["setting"] == SETTINGS["map_neighbours"]) & (one["path"] == "group")]
        of_arms.append(wanted.drop_duplicates("label").set_index("label"))
    both = of_arms[0][["gain"]].join(np.log(of_arms[1]["optimizer_steps"]))
    alike = both[both["optimizer_steps"].between(*np.log(ALIKE))]
    names = {"all": both, f"{ALIKE[0]} to {ALIKE[1]} steps": alike}
    return pd.DataFrame([
        {"arms": name, "count": len(arms), "correlation": arms["gain"].corr(arms["optimizer_steps"])}
        for name, arms in names.items()
    ])  # fmt: skip


def drawn_as(label: str) -> str:
    """The label under which an arm is drawn: the same with and without a critic."""
    return label.replace("BA-PPO", "BAPO").replace("GRPO, smaller batch", SIMPLE["small"])


def of_drawn(table: pd.DataFrame, labels: Collection[str]) -> pd.DataFrame:
    """The rows of the arms that are drawn, with their panel: the setting in words, and whether there is a critic."""
    settings = table["setting"].replace(IN_WORDS)
    panels = settings.where(table["path"] == "group", settings + ", with a critic")
    named = table.assign(panel=panels, label=table["label"].map(drawn_as))
    return named[named["label"].isin(labels)]


def intervals(table: pd.DataFrame, costs: Sequence[str], **encoding: Any) -> alt.FacetChart:
    """Gains with their intervals.

    Args:
        costs: A column for each: "seconds" are gains at equal seconds.
        encoding: Altair's encodings of the rows and their colours.
    """
    wanted = table[table["cost"].isin(costs)]
    base = alt.Chart(wanted).encode(**encoding)
    spread = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", title="gain over GRPO or PPO, points (95 %)"), x2="high:Q"
    )
    points = base.mark_point(filled=True, size=60, opacity=1).encode(x="gain:Q")
    zero = alt.Chart(wanted).mark_rule(strokeDash=[4, 4], color=MUTED).encode(x=alt.datum(0))
    panel = alt.layer(zero, spread, points).properties(width=200, height={"step": 11 if "yOffset" in encoding else 16})
    return panel.facet(
        alt.Facet("cost:N", title=None, sort=costs, header=alt.Header(labelExpr="'at equal ' + datum.value")), columns=1
    )


def picture(table: pd.DataFrame) -> alt.FacetChart:
    """Gain over the baseline by setting: a row for each setting, and a colour for each arm."""
    wanted = of_drawn(table, DRAWN)
    axis = alt.Axis(labelLimit=400, grid=True, tickBand="extent")
    return intervals(
        wanted, ["responses", "seconds"],
        color=alt.Color(
            "label:N", title=None, legend=alt.Legend(orient="top", columns=2),
            scale=alt.Scale(domain=list(DRAWN), range=[PALETTE[place] for place in (1, 3, 4, 0)]),
        ), yOffset=alt.YOffset("label:N", sort=DRAWN),
        y=alt.Y("panel:N", title=None, sort=list(dict.fromkeys(wanted["panel"])), axis=axis),
    )  # fmt: skip


def picture_of_arms(table: pd.DataFrame, optimizer: pd.DataFrame) -> alt.VConcatChart:
    """Optimizer steps and gain over GRPO with small batches: a row for each arm, the best first, coloured by answer.

    Args:
        optimizer: What `optimizer_steps` returns, with the setting.
    """
    setting = SETTINGS["map_neighbours"]
    gained, steps = (one[(one["setting"] == setting) & (one["path"] == "group")] for one in (table, optimizer))
    best = list(gained[gained["cost"] == "responses"].sort_values("gain", ascending=False)["label"])
    colours = alt.Scale(domain=list(ANSWERS), range=list(ANSWERS.values()))
    rows = alt.Y("label:N", title=None, sort=best, axis=alt.Axis(labelLimit=400))
    of_baseline = steps.loc[steps["label"] == "GRPO", "optimizer_steps"].iloc[0]
    title = alt.Title(["optimizer steps for 1,000 responses", "(dashed: those of GRPO)"], fontSize=13)
    base = alt.Chart(steps[steps["label"].isin(best)].drop_duplicates("label"), title=title)
    x = alt.X("optimizer_steps:Q", title=None)
    line = base.mark_rule(strokeDash=[4, 4], color=MUTED).encode(x=alt.datum(of_baseline))
    bars = alt.layer(base.mark_bar(color=PALETTE[6], height=8).encode(x=x, y=rows), line)
    color = alt.Color("answer:N", title=None, scale=colours, legend=alt.Legend(orient="top"))
    gains_of_arms = intervals(gained, ["responses", "tokens"], color=color, y=rows)
    return alt.vconcat(bars.properties(width=200, height={"step": 16}), gains_of_arms)


def picture_of_shares(table: pd.DataFrame) -> alt.FacetChart:
    """Gain over the baseline by the share of generation: a panel for each setting and path, a line for each arm."""
    wanted = of_drawn(table[table["setting"].isin(PRECISE)], LINES)
    wanted = wanted.drop_duplicates(["panel", "label", "share"])  # two studies have the same runs of GRPO
    colours = alt.Scale(domain=list(LINES), range=list(LINES.values()))
    legend = alt.Legend(orient="top", columns=2, columnPadding=24, labelLimit=300, symbolType="stroke", symbolOpacity=1)
    base = alt.Chart(wanted).encode(
        x=alt.X("share:Q", title="share of generation in a step of GRPO or PPO", axis=alt.Axis(format="%")),
        color=alt.Color("label:N", title=None, scale=colours, legend=legend),
    )
    spread = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title="gain, points (95 %)"), y2="high:Q")
    zero = alt.Chart(wanted).mark_rule(strokeDash=[4, 4], color=MUTED).encode(y=alt.datum(0))
    panel = alt.layer(zero, spread, base.mark_line(strokeWidth=2).encode(y="gain:Q")).properties(width=350, height=150)
    order = list(dict.fromkeys(wanted["panel"]))
    return panel.facet(facet=alt.Facet("panel:N", title=None, sort=order), columns=1)


def time_arms(study: Study, out: Path) -> pd.DataFrame:
    """Unit times of the arms that the figure has, from a run of each with up to STEPS steps: see `units_of`."""
    rows = []
    for arm in study.arms:
        if arm.method != PLAIN and drawn_as(arm.label) not in DRAWN:
            continue
        prompts = arguments.parse(study.words(arm, 1)).rollout.batch_size * STEPS
        words = [*study.words(arm, 1), "--data.max_samples", str(prompts), "--train.num_episodes", "1"]
        words += ["--eval.steps", "-1", "--run.dir", str(out), "--run.name", arm.name, "--run.overwrite"]
        subprocess.run([sys.executable, "-m", "bapo_openrlhf.cli", "train", *words], check=True, cwd=ROOT)
        rows.append(
            {"study": study.name, "arm": arm.name, **units_of(pd.DataFrame(record.read_metrics(out / arm.name)))}
        )
    return pd.DataFrame(rows)


def units_of(steps: pd.DataFrame) -> dict[str, float]:
    """Seconds of generating a response, and those of everything else in a step, over the steps after the first ones."""
    timed = steps[steps["step"] >= FIRST_TIMED]
    generation = timed["timing/generation"].sum()
    return {
        "response": generation / timed["rollouts/step"].sum(),
        "update": (timed[ALL_SECONDS].sum() - generation) / len(timed),
    }


TABLES = {  # of all studies: what makes their rows, and the decimals of their CSV
    "gains": (gains, 3),
    "pairs": (pairs, 2),
    "signal": (signal, 4),
    "optimizer_steps": (optimizer_steps, 2),
    "shares": (shares, 3),
}


def joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The tables of all studies as one, without the empty ones."""
    return pd.concat([one for one in tables if not one.empty], ignore_index=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the studies that there are, write the tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--time", nargs="*", choices=TIMED, metavar="STUDY",
        help="measure unit times of these studies first (default: all that are needed), on an idle machine",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep the records of the runs")
    given = parser.parse_args(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    times = FOLDER / "unit_times.csv"
    units = pd.read_csv(times) if times.is_file() else pd.DataFrame(columns=["study"])
    for name in () if given.time is None else given.time or TIMED:
        study = read_study(STUDIES / f"{name}.yaml")
        measured = time_arms(study, ROOT / "runs" / "unit_times" / name)
        units = pd.concat([units[units["study"] != name], measured])
        units.to_csv(times, index=False)
    studies, frames = {}, {name: [] for name in TABLES}
    for name, setting in SETTINGS.items():
        folder, records = ROOT / "runs" / "studies" / name, FOLDER / f"{name}.tar.xz"
        if given.keep and folder.is_dir():
            keep(folder / RUNS, records)
        with tempfile.TemporaryDirectory() as kept:
            if not folder.is_dir() and records.is_file():
                folder = Path(kept)
                with tarfile.open(records) as file:
                    file.extractall(folder / RUNS, filter="data")
            results = results_of(name, folder)
            if not results.runs:
                continue
            timed = units[units["study"] == TIMED_AS.get(name, name)]
            add_costs(results, None if timed.empty else timed.set_index("arm"))
            studies[name] = results
            for of, (table_of, _) in TABLES.items():
                frames[of].append(table_of(results).assign(setting=setting))
            curves = results.with_total(results.evaluations.dropna(), ROLLOUTS).assign(setting=setting)
            curves.to_parquet(FOLDER / f"{name}.parquet", index=False)
    tables = {name: joined(rows) for name, rows in frames.items()}
    for name, table in tables.items():
        table.round(TABLES[name][1]).to_csv(FOLDER / f"{name}.csv", index=False)
    table = tables["gains"]
    table.to_parquet(FOLDER / "gains.parquet", index=False)
    tests = confirmation({name: studies[name] for name in TESTS if name in studies})
    tests.round(4).to_csv(FOLDER / "confirmation.csv", index=False)
    beside_simple(studies).round(3).to_csv(FOLDER / "simple.csv", index=False)
    gain_by_steps(table, tables["optimizer_steps"]).round(3).to_csv(FOLDER / "gain_by_steps.csv", index=False)
    save_svg(picture(table), DOCS_IMAGES / "map.svg")
    save_svg(picture_of_arms(table, tables["optimizer_steps"]), DOCS_IMAGES / "map_arms.svg")
    save_svg(picture_of_shares(tables["shares"]), DOCS_IMAGES / "map_shares.svg")
    print(table.round(2).to_markdown(index=False), tests.round(4).to_markdown(index=False), sep="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The analysis of fair_trial_design.md, on made-up runs: against closed forms, brute force and simulation."""

import itertools
import re
from dataclasses import replace

import decision_stages as stages
import fair_trial
import kept_records
import numpy as np
import pandas as pd
import pytest
import replay_map
from decision import Records, updates
from made_runs import GROUPS, OF_STEP, STEPS, write_run, write_stage
from scipy import stats

pytestmark = pytest.mark.usefixtures("all_timed")
START = 0.2064
TOPS = {"plain": 0.5, "recipe": 0.6, "filter_only": 0.55, "bapo": 0.56}
TRAINED = {"plain": 500, "recipe": 300, "filter_only": 300, "bapo": 350}
UPDATE = {"plain": 1.0, "recipe": 0.8, "filter_only": 0.6, "bapo": 0.7}


@pytest.fixture
def all_timed(monkeypatch):
    """The made-up runs have few steps, so the first one counts for unit times as well."""
    monkeypatch.setattr(replay_map, "FIRST_TIMED", 1)


def top(method, seed):
    """Accuracy at the end. Runs differ by up to 2 points."""
    return TOPS[method] + 0.01 * np.sin(seed * (1 + list(TOPS).index(method)))


def write(name, root, skip=()):
    """Make the runs of a stage, without those that are named."""
    for run in stages.planned(stages.stage_of(name), root):
        method, round_ = run.arm.method, run.seed % 10
        if run.name not in skip:
            of_step = {"responses/trained": 40, "groups/fresh": 4} | (
                {"responses/skipped": 8} if method == "recipe" else {}
            )
            write_run(run, top(method, run.seed), trained=TRAINED[method], update=UPDATE[method] * (1 + 0.1 * round_),
                      metrics=lambda step, of_step=of_step: {"reward/fresh_mean": 0.1 * step, **of_step})  # fmt: skip


def height(method, seed, of_step, end):
    """Mean height of a straight line up to a cost, in closed form. A step costs `of_step`."""
    return START + (top(method, seed) - START) * end / (STEPS * of_step) / 2


def sides(better, than, cost):
    """Heights in points of both arms' runs at an equal cost. `cost` has the cost of a step of each method."""
    end = STEPS * min(cost[better], cost[than])
    return [100 * np.array([height(method, seed, cost[method], end) for seed in range(401, 417)])
            for method in (better, than)]  # fmt: skip


# ── two samples ──


def test_p_is_the_share_of_permutations_that_are_as_far():
    rng = np.random.default_rng(1)
    first, second = rng.normal(1.5, 1, 5), rng.normal(0, 3, 4)
    pooled, found = np.concatenate([first, second]), abs(welch(first, second))
    values = []
    for chosen in itertools.combinations(range(9), 5):
        rest = [place for place in range(9) if place not in chosen]
        values.append(welch(pooled[list(chosen)], pooled[rest]))
    values, sign = np.array(values), np.sign(welch(first, second))
    one_sided = np.mean(sign * values >= found - 1e-9)
    assert fair_trial.permutation_p(first, second) == pytest.approx(min(1, 2 * one_sided))


def welch(first, second):
    return stats.ttest_ind(first, second, equal_var=False).statistic


def test_the_test_holds_its_level_if_the_spreads_differ(monkeypatch):
    monkeypatch.setattr(fair_trial, "DRAWS", 499)
    rng, cases = np.random.default_rng(0), 600
    small = sum(fair_trial.permutation_p(rng.normal(0, 1.5, 16), rng.normal(0, 3.5, 16)) < 0.05 for _ in range(cases))
    assert 0.025 * cases < small < 0.08 * cases


def test_an_interval_of_one_round_is_welchs():
    rng = np.random.default_rng(0)
    first, second = rng.normal(3, 1, 16), rng.normal(0, 4, 14)
    found = fair_trial.difference(first[None], second[None])
    wanted = stats.ttest_ind(first, second, equal_var=False).confidence_interval()
    assert found == pytest.approx((first.mean() - second.mean(), wanted.low, wanted.high))


def test_an_interval_has_the_error_of_the_rounds():
    """If the runs hardly differ, it is Student's of the rounds."""
    rounds, runs = np.array([1.0, 2.0, 4.0]), 1e-6 * np.random.default_rng(0).normal(size=(2, 16))
    found = fair_trial.difference(rounds[:, None] + runs[:1], np.zeros((3, 1)) + runs[1:])
    wanted = stats.ttest_1samp(rounds, 0).confidence_interval()
    assert found == pytest.approx((rounds.mean(), wanted.low, wanted.high), abs=1e-4)


# ── comparisons ──


def test_primary_comparisons(tmp_path):
    write("recipe", tmp_path)
    write("recipe_units", tmp_path)
    table = fair_trial.primary(Records(tmp_path), "fair").set_index(["better", "than", "cost"])
    tokens = {method: 500 + trained for method, trained in TRAINED.items()}
    for than, label in (("plain", "GRPO"), ("bapo", "BAPO")):
        row, (first, second) = table.loc[("skip, two updates", label, "tokens")], sides("recipe", than, tokens)
        interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval()
        wanted = (first.mean() - second.mean(), interval.low, interval.high)
        assert tuple(row[["gain", "low", "high"]]) == pytest.approx(wanted, abs=1e-6)
        assert row["p"] == pytest.approx(2 / 100_000, rel=0.01) and row["answer"] == "ahead"
        assert row["p_holm"] == pytest.approx(3 * 2 / 100_000, rel=0.01)
    by_round = []
    for number in (1, 2, 3):
        seconds = {method: 0.01 * OF_STEP + UPDATE[method] * (1 + 0.1 * number) for method in TOPS}
        by_round.append(sides("recipe", "plain", seconds))
    wanted = fair_trial.difference(*(np.array([both[place] for both in by_round]) for place in (0, 1)))
    row = table.loc[("skip, two updates", "GRPO", "seconds")]
    assert tuple(row[["gain", "low", "high"]]) == pytest.approx(tuple(wanted), abs=1e-6)
    assert set(table["answer"][3:]) == {"not yet"} and table["p"][3:].isna().all()
    (drawn,) = (rows for rows in fair_trial.picture(table.reset_index()).to_dict()["datasets"].values()
                if "pair" in rows[0])  # fmt: skip
    assert {row["pair"]: row["gain"] for row in drawn} == {
        f"{better} - {than}, equal {cost}": pytest.approx(row["gain"])
        for (better, than, cost), row in table[:3].iterrows()
    }


@pytest.mark.parametrize("lacks", ["recipe", "recipe_units"])
def test_nothing_is_shown_before_the_end_of_a_stage(tmp_path, lacks):
    """Not even of arms whose runs have all ended. A run that has failed for good has ended."""
    lost = stages.planned(stages.stage_of(lacks), tmp_path)[-1]
    for name in ("recipe", "recipe_units"):
        write(name, tmp_path, skip=(lost.name,))
    tables = fair_trial.tables_of(Records(tmp_path), "fair")
    assert [name for name, table in tables.items() if not table.empty] == ["Primary comparisons"]
    assert set(tables["Primary comparisons"]["answer"]) == {"not yet"}
    assert tables["Primary comparisons"][["gain", "low", "high", "p"]].isna().all(axis=None)
    lost.folder.mkdir(parents=True, exist_ok=True)
    (lost.folder / stages.FAILED).touch()
    assert set(fair_trial.primary(Records(tmp_path), "fair")["answer"][:3]) == {"ahead"}


def test_arms_without_a_comparison_are_shown_when_all_of_them_have_ended(tmp_path, monkeypatch):
    """They lie in the folders of the other arms, and the comparisons do not wait for them."""
    monkeypatch.setattr(stages, "FAIR", tuple(replace(stage, seeds=stage.seeds[:2]) for stage in stages.FAIR))
    write_stage("shape_rates", tmp_path)
    write_stage("shape", tmp_path, lambda method, rate, seed: 0.5 + 0.01 * (seed % 2))

    def shown():
        results = Records(tmp_path).results("shape")
        return {stages.method_of(run.arm) for run in results.runs}

    first = {"filter_only", "wide", "matched"}
    assert shown() == first
    assert not set(fair_trial.primary(Records(tmp_path), "fair")["answer"][3:5]) & {"not yet", "not tested"}
    write_stage("others_rates", tmp_path)
    [last, *others] = stages.planned(stages.stage_of("others"), tmp_path)
    assert last.folder.parent == stages.planned(stages.stage_of("shape"), tmp_path)[0].folder.parent
    for run in others:
        write_run(run, 0.5)
    assert shown() == first
    write_run(last, 0.5)
    assert shown() == first | {"plain", "bapo"}


def test_each_part_is_a_family_of_its_own(tmp_path, monkeypatch):
    write("recipe", tmp_path)
    write("recipe_units", tmp_path)
    monkeypatch.setattr(fair_trial, "permutation_p", lambda first, second: 0.02)
    found = fair_trial.primary(Records(tmp_path), "fair")
    assert list(found["p_holm"][:3]) == pytest.approx([0.06] * 3)
    assert [len(rows) for _, rows in found.groupby("stage", sort=False)] == [3, 2, 2]


def test_the_design_names_the_same_comparisons():
    design = (kept_records.RESULTS.parent / "fair_trial_design.md").read_text()
    rows = [line.split(" | ") for line in design.splitlines() if re.match(r"\| \d \| [A-Z].*\| part \d \|$", line)]
    assert [(row[1], row[3]) for row in rows] == [(one.question, one.cost) for one in fair_trial.comparisons("fair")]
    design = (kept_records.RESULTS.parent / "critic_design.md").read_text()
    rows = [line.split(" | ") for line in design.splitlines() if re.match(r"\| \d \| [A-Z]", line)]
    questions = [one.question for one in fair_trial.comparisons("critic")]
    assert [row[1] for row in rows if row[1] in questions] == questions


# ── tables ──


def test_rewards_stand_at_the_step_before(tmp_path):
    """The mean reward of a step is that of the policy before it, so the first one costs nothing."""
    write("recipe", tmp_path)
    results = fair_trial.fresh(Records(tmp_path).results("recipe"))
    curves = results.curve(["plain-group"])
    rewards = 0.1 * np.arange(1, STEPS + 1)  # at 0, 1, ... steps
    assert curves.to_numpy() == pytest.approx(np.trapezoid(rewards) / (STEPS - 1))


def test_a_skipped_group_is_planned_and_divides(tmp_path):
    """40 responses are trained on, and a group of 8 is all right and skipped: two updates of 32, and not of 40."""
    write("recipe", tmp_path)
    results = Records(tmp_path).results("recipe")
    steps = replay_map.optimizer_steps(results).set_index("label")["optimizer_steps"]
    assert steps["skip, two updates"] == pytest.approx(1000 * np.ceil((40 + 8) / 32) / OF_STEP)
    assert steps["filter only"] == pytest.approx(1000 * 1 / OF_STEP)
    silent = next(tokens for state, mean, tokens in GROUPS if state == "filtered" and mean == 1)
    scale = updates(results).set_index("label")["loss scale"]
    assert scale["skip, two updates"] == pytest.approx((300 - 100) / (300 + silent))
    assert scale["filter only"] == pytest.approx((300 - 100) / 300)


def first_of_bapo(root):
    """The first planned run of BAPO in the stage "recipe"."""
    return next(run for run in stages.planned(stages.stage_of("recipe"), root) if run.arm.method == "bapo")


def test_what_the_batches_held(tmp_path):
    """X3 is a group of age 1 in step 2, and two of age 3 in step 3."""
    run = first_of_bapo(tmp_path)
    age = "staleness/replayed_steps_mean"
    names = ("groups/fresh", "tv/fresh", "groups/replayed", age, "tv/replayed")
    of_step = {step: dict(zip(names, values, strict=True)) for step, values in {
        1: (4, 0.1, 0, None, None), 2: (3, 0.2, 1, 1, 0.2), 3: (2, 0.2, 2, 3, 0.4),
        4: (3, 0.2, 0, None, None)}.items()}  # fmt: skip
    of_step[4] |= {"groups/reevaluated": 1, "tv/reevaluated": 0.05}
    write_run(run, 0.5, metrics=lambda step: {"responses/trained": 32, **of_step[step]})
    results = Records(tmp_path).results("recipe")
    groups = results.runs[0].run.groups
    groups.loc[len(groups)] = {"step": 4, "uid": 99, "prompt": "p0", "source": "reevaluated", "state": "reevaluated",
                               "mean": 0.5, "responses": 8, "tokens": 100}  # fmt: skip
    groups.loc[(groups["prompt"] == "p0") & (groups["source"] == "fresh"), "step"] = 1
    row = fair_trial.batches(results).set_index("label").loc["BAPO"]
    assert row["X2, %"] == pytest.approx(100 / 16) and row["X3, %"] == pytest.approx(300 / 16)
    assert row["age of X3"] == pytest.approx((1 + 2 * 3) / 3) and row["TV X3"] == pytest.approx((0.2 + 2 * 0.4) / 3)
    assert row["TV X1"] == pytest.approx((4 * 0.1 + 8 * 0.2) / 12) and row["TV X2"] == 0.05
    assert row["wait of X2"] == 3 and row["groups"] == 4 and row["updates"] == STEPS
    assert row["age of X3, updates"] == row["age of X3"]  # one update in a step
    assert row["updates, equal responses"] == STEPS and row["trained, per token"] == pytest.approx(400 / 500)


def test_groups_that_are_asked_again(tmp_path):
    """Each step asks one hard prompt again, which stays hard. Step 2 also has groups with a prefix."""
    run = first_of_bapo(tmp_path)
    numbers = {"groups/unimproved": 1, "groups/prefixed": 0, "groups/unsteered": 0}
    second = {"groups/prefixed": 1, "groups/unsteered": 3, "prefix/mean_reward": 0.25}
    write_run(run, 0.5, metrics=lambda step: numbers | (second if step == 2 else {}))
    table = fair_trial.asked_again(Records(tmp_path).results("recipe"))
    assert table.drop(columns="label").to_numpy().tolist() == [[1, 4 / STEPS, 0.25, 75]]
    write_run(run, 0.5, metrics=lambda step: numbers)
    table = fair_trial.asked_again(Records(tmp_path).results("recipe"))
    assert table.empty


def test_what_a_comparison_can_see_is_found_in_80_of_100_draws():
    rng, cases = np.random.default_rng(0), 4000
    seen = fair_trial.detectable((1.5, 3.4), 16, 3)
    first, second = rng.normal(seen, 1.5, (cases, 16)), rng.normal(0, 3.4, (cases, 16))
    p = stats.ttest_ind(first, second, axis=1, equal_var=False).pvalue
    assert np.mean(p < 0.05 / 3) == pytest.approx(0.8, abs=0.02)


def test_kept_records_give_the_same_page(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(fair_trial, "DRAWS", 99)
    monkeypatch.setattr(fair_trial, "SHARES", [0.5])
    monkeypatch.setattr(fair_trial, "DOCS_IMAGES", tmp_path)
    for name in ("recipe", "recipe_units"):
        write(name, tmp_path)
    page = kept_records.folder_of("fair") / "fair_trial.md"
    assert fair_trial.main(["--runs", str(tmp_path), "--keep"]) == 0
    first = page.read_text()
    for part in ("Gain over GRPO (recipe)", "| fresh rewards |", "Batches (recipe)", "Unit times (recipe)", "Xeon"):
        assert part in first, part
    page.unlink()
    assert fair_trial.main([]) == 0 and page.read_text() == first
    pd.testing.assert_frame_equal(pd.read_csv(page.parent / "failed.csv"), pd.DataFrame(columns=["stage", "run"]),
                                  check_dtype=False)  # fmt: skip

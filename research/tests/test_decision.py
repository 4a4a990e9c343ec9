"""The analysis of decision_design.md, on made-up runs: against closed forms, brute force and simulation."""

import json
import re
from dataclasses import replace

import age_or_distance
import decision
import decision_stages as stages
import kept_records
import numpy as np
import pandas as pd
import pytest
import replay_map
from made_runs import GROUPS, OF_STEP, STEPS, write_run
from scipy import stats

pytestmark = pytest.mark.usefixtures("small_search")
START = 0.2064
SEARCH = stages.Stage(
    "rates", 1, "best_rates", (201,), {"plain": 1, "filter_only": 1, "bapo": 1, "half": 1}, grid=(1e-4,)
)
METHODS = {"plain": 1, "filter_only": 1, "without_x2": 1, "in_denominator": 1}
RUNS = stages.Stage("runs", 1, "best_rates", tuple(range(61, 71)), METHODS, rates_from="rates")
UNITS = stages.Stage("units", 1, "best_rates", (301, 302, 303), RUNS.seconds, rates_from="rates")
UNTIMED = pd.DataFrame(columns=["arm", "round", "response", "update"])
AGE = stages.Stage("age", 4, "age_or_distance", (91,), {"small": 1, "large": 1})
HARD = stages.Stage("hard", 2, "hard_prompts", (71, 72), {"plain": 1, "bapo": 1}, rates_from="rates", solved=True)
ONE_RATE = stages.Stage("one_rate", 1, "best_rates", RUNS.seeds, {"plain": 1, "bapo": 1}, flags={stages.RATE: 1e-4},
                        beside="runs")  # fmt: skip
MORE = stages.Stage("hard_more", 2, "hard_prompts_more", (71, 72), {"luffy": 1, "ar3po": 1, "bapo_asks_eighths": 1},
                    rates_from="rates", beside="hard")  # fmt: skip
CRITIC = stages.Stage("critic", 3, "critic", (81, 82), {"filter_only": 1, "without_x2": 1}, rates_from="rates")
TOPS = {"plain": 0.5, "filter_only": 0.6, "without_x2": 0.6, "in_denominator": 0.5, "plain_0.0001": 0.4,
        "bapo_0.0001": 0.7}  # fmt: skip
TRAINED = {"plain": 500, "filter_only": 300, "without_x2": 350, "in_denominator": 500, "plain_0.0001": 500,
           "bapo_0.0001": 400}  # fmt: skip


def top(method: str, seed: int) -> float:
    """Accuracy at the end: pairs differ by up to 5 points, and without X2 is not always above filter only."""
    return TOPS[method] + 0.05 * np.sin(seed * (1 + (method in ("without_x2", "bapo_0.0001"))))


@pytest.fixture
def records(tmp_path, monkeypatch):
    for module in (stages, decision):
        monkeypatch.setattr(module, "STAGES", (SEARCH, UNITS, RUNS, HARD))
    monkeypatch.setattr(stages, "MOST_MORE", 0)
    monkeypatch.setattr(kept_records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(decision, "FOLDER", kept_records.folder_of("decision"))
    kept_records.folder_of("decision").mkdir(parents=True)
    for run in stages.planned(SEARCH, tmp_path):
        write_run(run, 0.5)
    for run in stages.planned(RUNS, tmp_path):
        method = run.arm.method
        write_run(run, top(method, run.seed), trained=TRAINED[method])
    return decision.Records(tmp_path)


def height(method: str, seed: int, of_step: float, end: float) -> float:
    """Mean height of a curve up to a cost, by the midpoints of 100,000 pieces. A step costs `of_step`."""
    costs = (np.arange(100_000) + 0.5) / 100_000 * end
    return float(np.interp(costs / of_step, [0, STEPS], [START, top(method, seed)]).mean())


def differences(arm: str, other: str, of_step: dict[str, float]) -> np.ndarray:
    """Differences in points of the ten pairs at equal cost, by brute force."""
    end = STEPS * min(of_step[arm], of_step[other])
    return 100 * np.array([height(arm, seed, of_step[arm], end) - height(other, seed, of_step[other], end)
                           for seed in RUNS.seeds])  # fmt: skip


# ── intervals ──


def test_an_interval_without_an_error_of_the_rounds_is_students():
    pairs = np.array([1.0, 2.5, -0.5, 4.0])
    wanted = stats.ttest_1samp(pairs, 0).confidence_interval()
    for rounds in (1, 3):
        found = decision.crossed_interval(np.tile(pairs, (rounds, 1)))
        assert found == pytest.approx((pairs.mean(), wanted.low, wanted.high))


def test_an_interval_with_equal_pairs_is_students_of_the_rounds():
    rounds = np.array([1.0, 2.0, 4.0])
    wanted = stats.ttest_1samp(rounds, 0).confidence_interval()
    assert decision.crossed_interval(np.tile(rounds[:, None], (1, 10))) == pytest.approx(
        (rounds.mean(), wanted.low, wanted.high))  # fmt: skip
    assert decision.crossed_interval(np.full((3, 10), 2.0)) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(("pairs_spread", "rounds_spread"), [(1.0, 1.0), (2.0, 0.3), (0.3, 1.0)])
def test_the_interval_covers_the_truth_in_about_95_of_100_cases(pairs_spread, rounds_spread):
    """And the one of the pairs only does not, where the rounds differ."""
    rng, covered, too_narrow, cases = np.random.default_rng(0), 0, 0, 2000
    for _ in range(cases):
        made = 3.0 + pairs_spread * rng.normal(size=10) + rounds_spread * rng.normal(size=(3, 1))
        found, narrow = decision.crossed_interval(made), decision.crossed_interval(made.mean(axis=0)[None])
        covered += found.low < 3 < found.high
        too_narrow += not narrow.low < 3 < narrow.high
    assert 0.93 * cases < covered < 0.985 * cases
    assert rounds_spread < 1 or too_narrow > 0.15 * cases


# ── comparisons ──


def test_primary_comparisons(records):
    table = decision.primary(records).set_index("question")
    assert len(table) == len(decision.PRIMARY) <= 10
    of_step = {"filter_only": 500 + 300, "plain": 500 + 500, "without_x2": 500 + 350}
    for question, arm, other in (
        ("Does the filter pay?", "filter_only", "plain"),
        ("Does replay add to the filter?", "without_x2", "filter_only"),
    ):
        row, wanted = table.loc[question], differences(arm, other, of_step)
        assert row["gain"] == pytest.approx(wanted.mean(), abs=1e-3) and row["pairs"] == 10
        interval = stats.ttest_1samp(wanted, 0).confidence_interval()
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=0.01)
        exact = stats.permutation_test((wanted,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert row["p"] == pytest.approx(exact.pvalue)
    assert table["p"].iloc[0] == 2 / 1024 and table["p"].iloc[1] > 0.05
    assert table["p_holm"].iloc[0] == 9 * 2 / 1024  # the others that have no runs count as 1
    assert table["answer"].iloc[0] == "ahead"
    assert list(table["answer"][2:]) == 4 * ["not tested"] + 2 * ["not yet"] + ["not tested"]  # the last has no runs
    assert table.iloc[2:][["p", "p_holm"]].isna().all(axis=None)


def test_a_comparison_has_no_answer_until_all_runs_of_its_arms_have_ended(records, tmp_path):
    """A run of another arm may be missing, and one that has failed for good has ended."""
    runs = {(run.arm.method, run.seed): run.folder for run in stages.planned(RUNS, tmp_path)}
    for method in ("filter_only", "in_denominator"):
        (runs[method, 70] / "summary.json").unlink()
    numbers = ["gain", "low", "high", "p", "p_holm"]
    for row in decision.primary(decision.Records(tmp_path)).to_dict("records")[:2]:
        assert row["answer"] == "not yet" and row["pairs"] == 9 and all(np.isnan(row[name]) for name in numbers)
    (runs["filter_only", 70] / stages.FAILED).touch()
    row = decision.primary(decision.Records(tmp_path)).iloc[0]
    assert (row["answer"], row["pairs"], row["p"], row["p_holm"]) == ("ahead", 9, 2 / 512, 9 * 2 / 512)


@pytest.mark.parametrize(
    ("explains", "p", "expected"),
    [
        ({"filter_only": (0.3, 0.15), "without_x2": (0.3, 0.2)}, 0.5, "suggested"),  # the mean of an arm counts
        ({"filter_only": (0.3, 0.05), "without_x2": (0.3, 0.3)}, np.nan, "not tested"),
        ({"filter_only": (0.3, 0.3), "without_x2": (0.1, 0.2)}, np.nan, "not tested"),
    ],
)
def test_nothing_is_answered_about_a_critic_that_knows_nothing(records, tmp_path, monkeypatch, explains, p, expected):
    monkeypatch.setattr(stages, "STAGES", (SEARCH, CRITIC))
    monkeypatch.setattr(decision, "STAGES", (SEARCH, CRITIC))
    for run in stages.planned(CRITIC, tmp_path):
        top = 0.5 + (0.1 if run.arm.method == "without_x2" else 0.01 * run.seed - 0.8)
        write_run(run, top, explained=[explains[run.arm.method][run.seed - 81]] * STEPS)
    row = decision.primary(decision.Records(tmp_path)).iloc[-1]
    assert row["answer"] == expected and row["pairs"] == 2 and row["gain"] > 0
    assert row["p"] == pytest.approx(p, nan_ok=True)


def test_a_corrected_p_can_only_become_smaller_when_more_comparisons_are_made():
    rng = np.random.default_rng(0)
    for _ in range(200):
        p = rng.choice([2, 4, 6, 20, 100, 600], size=9) / 1024
        known = rng.integers(1, 9)
        before = decision.holm([*p[:known], *[1.0] * (9 - known)])[:known]
        assert (np.array(decision.holm(p))[:known] <= np.array(before) + 1e-12).all()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((5, 3, 7, 0.04), "ahead"),
        ((2.0, 0.9, 3.1, 0.04), "ahead"),
        ((0.8, 0.3, 1.3, 0.02), "ahead, by less than counts"),
        ((2.9, -0.1, 2.99, 0.04), "ahead, by less than counts"),
        ((-5, -7, -3, 0.04), "behind"),
        ((-2.0, -3.1, -0.9, 0.04), "behind"),
        ((-0.8, -1.3, -0.3, 0.02), "behind, by less than counts"),
        ((1, -0.5, 2.9, 0.3), "no difference that counts"),
        ((1, 0.5, 1.5, 0.3), "no difference that counts"),
        ((1, -0.5, 3.1, 0.3), "no information"),
        ((-1, -3.1, 0.5, 0.06), "no information"),
        ((2, 0.5, 3.5, 0.06), "suggested"),
        ((-4, -7.5, -0.5, 0.3), "suggested"),
    ],
)
def test_answers(row, expected):
    assert decision.answer({**dict(zip(("gain", "low", "high", "p_holm"), row, strict=True)), "counts": 3}) == expected


def test_what_was_solved(records, tmp_path):
    question = "Does BAPO solve more of what was never solved?"
    for run in stages.planned(HARD, tmp_path):
        write_run(run, 0.5)
        row = decision.primary(decision.Records(tmp_path)).set_index("question").loc[question]
        assert row["answer"] == "not yet" and np.isnan(row["gain"])  # also after the last run: it has to be counted
        count = {"plain": 10, "bapo": 20}[run.arm.method] + run.seed % 2
        (run.folder / "solved.json").write_text(f'{{"solved": {count}, "of": 50}}')
    row = decision.primary(decision.Records(tmp_path)).set_index("question").loc[question]
    assert (row["gain"], row["pairs"], row["p"]) == (pytest.approx(20.0), 2, 0.5)


def test_forms_of_x2_beside_none_of_it(records, tmp_path, monkeypatch):
    """The arms of two stages. One whose runs are not all counted is left out."""
    hard = replace(HARD, seconds={"bapo": 1, "bapo_c1_0": 1, "without_x2": 1})
    for module in (stages, decision):
        monkeypatch.setattr(module, "STAGES", (SEARCH, hard, MORE))
    solves = {"bapo": (10, 14), "bapo_c1_0": (9, None), "without_x2": (5, 5), "bapo_asks_eighths": (6, 6)}
    for stage in (hard, MORE):
        for run in stages.planned(stage, tmp_path):
            write_run(run, 0.5)
            if (count := solves.get(run.arm.method, (1, 1))[run.seed - 71]) is not None:
                (run.folder / "solved.json").write_text(f'{{"solved": {count}, "of": 50}}')
    rows = decision.forms_of_x2(decision.Records(tmp_path)).set_index("method")
    assert list(rows.index) == ["bapo", "bapo_asks_eighths"]
    wanted = stats.ttest_1samp([10.0, 18.0], 0).confidence_interval()
    assert tuple(rows.loc["bapo"]) == pytest.approx((2, 14.0, wanted.low, wanted.high))
    assert tuple(rows.loc["bapo_asks_eighths"]) == pytest.approx((2, 2.0, 2.0, 2.0))


def test_mixed_runs_are_not_read(records, tmp_path):
    write_run(stages.planned(RUNS, tmp_path)[0], 0.5, commit="b" * 40)
    with pytest.raises(ValueError, match="stage runs: arm plain-group has runs of 2 values of commit"):
        records.results("runs")


def test_the_design_names_the_same_comparisons():
    design = (kept_records.RESULTS.parent / "decision_design.md").read_text()
    rows = [line.split(" | ") for line in design.splitlines() if re.match(r"\| \d \| [A-Z].*\?.* points \|$", line)]
    assert [row[1] for row in rows] == [comparison.question for comparison in decision.PRIMARY]
    costs = [(row[4], float(row[5].split()[0])) for row in rows]
    assert costs == [(comparison.cost, comparison.counts) for comparison in decision.PRIMARY]


# ── costs ──


def test_groups_without_a_signal_cost_nothing_where_they_only_divide(records):
    """A step of the made-up runs trains on 500 tokens, of which 100 are of a group that is all wrong."""
    steps = records.results("runs").steps.set_index(["arm", "seed", "step"])
    useless = next(tokens for state, mean, tokens in GROUPS if state == "fresh" and mean == 0)
    for step in (1, STEPS):
        for arm, trained in (("plain-group", 500), ("in_denominator-group", 500 - useless)):
            assert steps.loc[(arm, 61, step), replay_map.UPDATE_TOKENS] == trained * step
            assert steps.loc[(arm, 61, step), "cost/tokens"] == (500 + trained) * step


def test_gains_at_equal_seconds_have_the_error_of_the_unit_times(records):
    results = records.results("runs")
    units = pd.DataFrame([
        {"arm": arm, "round": number, "response": response, "update": update}
        for number, (response, plain, filtered) in enumerate([(0.01, 1.0, 0.5), (0.02, 1.2, 0.9), (0.01, 1.1, 0.6)])
        for arm, update in (("plain-group", plain), ("filter_only-group", filtered))
    ])  # fmt: skip
    by_round, divided = [], []
    for _, of_round in units.groupby("round"):
        costs = {row.arm.removesuffix("-group"): OF_STEP * row.response + row.update for row in of_round.itertuples()}
        by_round.append(differences("filter_only", "plain", costs))
        divided.append(differences("in_denominator", "plain", costs | {"in_denominator": costs["filter_only"]}))
    wanted = decision.crossed_interval(np.array(by_round))
    found = decision.at_equal_seconds(results, "filter_only-group", "plain-group", units)
    assert found == pytest.approx(wanted, abs=0.01)
    assert np.ptp(np.mean(by_round, axis=1)) > 1  # otherwise the rounds would not matter
    again = decision.gains(results, units).set_index(["label", "cost"])
    assert again.loc[("filter only", "seconds"), "gain"] == pytest.approx(wanted.value, abs=0.01)
    tokens = differences("filter_only", "plain", {"filter_only": 800, "plain": 1000})
    assert again.loc[("filter only", "tokens"), "gain"] == pytest.approx(tokens.mean(), abs=1e-3)
    assert ("BAPO without X2", "seconds") not in again.index  # it has no unit times
    priced = again.loc[("filter only, divided by all groups", "seconds")]  # its steps take as long as filter only's
    wanted = decision.crossed_interval(np.array(divided))
    assert tuple(priced[["gain", "low", "high"]]) == pytest.approx(wanted, abs=0.01)
    steps = results.steps.set_index(["arm", "seed", "step"])
    assert steps.loc[("in_denominator-group", 61, 1), replay_map.UPDATE_TOKENS] == 400


def test_gains_at_one_rate(records, tmp_path, monkeypatch):
    """GRPO and BAPO have two rates, and each is an arm. Arms at other rates are not in this table."""
    monkeypatch.setattr(stages, "_chosen", {})
    found = {"plain": {2e-4: 0.5}, "bapo": {2e-4: 0.5}, "filter_only": {1e-4: 0.5}, "half": {1e-4: 0.5}}
    monkeypatch.setattr(stages, "known_heights", lambda stage: found)
    for module in (stages, decision):
        monkeypatch.setattr(module, "STAGES", (SEARCH, RUNS, ONE_RATE))
    for run in stages.planned(ONE_RATE, tmp_path):
        method = run.arm.method
        write_run(run, top(method, run.seed), trained=TRAINED[method], commit="b" * 40)  # a later one
    records = decision.Records(tmp_path)
    table = decision.at_one_rate(records.results("runs")).set_index(["label", "than", "cost"])
    filter_only, grpo, bapo = "filter only", "GRPO, 1e-04", "BAPO, 1e-04"
    arms = {filter_only: "filter_only", grpo: "plain_0.0001", bapo: "bapo_0.0001"}
    wanted = {
        (one, other, cost)
        for one, other in ((filter_only, grpo), (bapo, grpo), (bapo, filter_only))
        for cost in ("responses", "tokens")
    }
    assert set(table.index) == wanted
    for (one, other, cost), row in table.iterrows():
        costs = {arm: OF_STEP if cost == "responses" else 500 + TRAINED[arm] for arm in arms.values()}
        pairs = differences(arms[one], arms[other], costs)
        interval = stats.ttest_1samp(pairs, 0).confidence_interval()
        expected = (10, pairs.mean(), interval.low, interval.high)
        assert tuple(row[["pairs", "gain", "low", "high"]]) == pytest.approx(expected, abs=0.01)
    [row] = decision.gains(records.results("runs"), UNTIMED).query("label == 'filter only' and cost == 'tokens'").gain
    own = differences("filter_only", "plain", {"filter_only": 800, "plain": 1000}).mean()
    assert row == pytest.approx(own, abs=1e-3)  # over GRPO with its own rate
    write_run(stages.planned(ONE_RATE, tmp_path)[0], 0.5, commit="b" * 40, cpu="EPYC")
    with pytest.raises(ValueError, match="seed 61 has runs of 2 values of cpu"):
        decision.Records(tmp_path).results("runs")


def test_replay_is_compared_with_the_filter_that_has_its_v(records, tmp_path, monkeypatch):
    of_runs = dict.fromkeys(("plain", "bapo", "without_x2", "filter_only_delayed"), 1)
    runs = replace(RUNS, seeds=(61, 62), seconds=of_runs)
    for module in (stages, decision):
        monkeypatch.setattr(module, "STAGES", (SEARCH, runs))
    for run in stages.planned(runs, tmp_path):
        write_run(run, 0.5)
    table = decision.gains(decision.Records(tmp_path).results("runs"), UNTIMED)
    assert set(table[table["than"] == "filter only, v = 2"]["label"]) == {"BAPO", "BAPO without X2"}


def test_gains_beside_grpo_that_has_groups_without_a_signal_for_free(records):
    """It pays 500 + 400 tokens for a step. So does the arm that is run as the control."""
    table = decision.beside_free(records.results("runs")).set_index(["label", "than"])
    free, costs = replay_map.SIMPLE[replay_map.FREE], {"plain": 1000, "filter_only": 800, "in_denominator": 900}
    wanted = {
        (free, "GRPO"): differences("in_denominator", "plain", costs),  # it has the curve of GRPO
        ("filter only", free): differences("filter_only", "in_denominator", costs),
        ("filter only, divided by all groups", free): np.zeros(10),
    }
    for key, pairs in wanted.items():
        interval = stats.ttest_1samp(pairs, 0).confidence_interval() if pairs.any() else (0, 0)
        expected = (10, pairs.mean(), *interval)
        assert tuple(table.loc[key]) == pytest.approx(expected, abs=0.01)
    assert len(table) == len(METHODS)


def test_a_search_shows_both_rules(tmp_path, monkeypatch):
    """The lower run of 1e-4 is the best one, and the mean of 2e-4. Heights without runs are as they were noted."""
    two = replace(SEARCH, seeds=(201, 202), seconds={"plain": 1}, grid=(1e-4, 2e-4))
    monkeypatch.setattr(stages, "MOST_MORE", 0)
    for run in stages.planned(two, tmp_path):
        write_run(run, {(1e-4, 201): 0.6, (1e-4, 202): 0.6, (2e-4, 201): 0.9, (2e-4, 202): 0.5}[
            float(run.arm.flags[stages.RATE]), run.seed])  # fmt: skip
    table = decision.searches(tmp_path, [two]).set_index("rate")
    mean = {top: 100 * (top + START) / 2 for top in (0.5, 0.6, 0.9)}
    assert list(table["height"]) == pytest.approx([mean[0.6], mean[0.5]])
    assert list(table["runs"]) == [f"{mean[0.6]:.1f}, {mean[0.6]:.1f}", f"{mean[0.9]:.1f}, {mean[0.5]:.1f}"]
    assert list(table[""]) == ["taken", ""] and list(table["first rule"]) == ["", "taken"]
    monkeypatch.setattr(stages, "known_heights", lambda stage: {"plain": {1e-4: 0.5, 2e-4: 0.4}})
    noted = decision.searches(tmp_path, [two])
    assert list(noted["runs"]) == list(noted["first rule"]) == ["", ""] and list(noted[""]) == ["taken", ""]


def test_runs_that_had_ended_before_a_change(records, tmp_path):
    first, second = (run.folder / "summary.json" for run in stages.planned(RUNS, tmp_path)[:2])
    for summary, end in ((first, "2026-11-27T14:10:31+00:00"), (second, "2026-11-27T14:15:00+00:00")):
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"finished": end}))
    assert list(decision.ended_before(records)["runs that had ended"]) == [1, 2]


def test_unit_times(records, tmp_path):
    for run in stages.planned(UNITS, tmp_path):
        write_run(run, 0.5, update=1.0 + run.seed % 10)
    found = records.units()
    assert len(found) == 4 * 3 and set(found["round"]) == {301, 302, 303}


# ── updates ──


def test_how_arms_update(records):
    rows = decision.updates(records.results("runs")).set_index("label")
    assert rows.loc["GRPO", "loss scale"] == pytest.approx(1 - 100 / 500)
    assert rows.loc["filter only", "loss scale"] == pytest.approx(1 - 100 / 300)
    # Norms are 0.5 and 2 in turn, and max_norm is 1.
    assert list(rows.loc["GRPO", ["gradient norm", "clipped steps", "clipped tokens"]]) == [1.25, 0.5, 0.25]
    assert (rows["rate"] == 1e-4).all()
    assert rows.loc["GRPO", "steps"] == pytest.approx(1000 / 64)


def test_the_loss_scale_is_that_of_groups_with_a_gradient(records, tmp_path, monkeypatch):
    """With a critic, LUFFY and AR3PO, a group whose own rewards are equal may have one."""
    for module in (stages, decision):
        monkeypatch.setattr(module, "STAGES", (SEARCH, HARD, MORE, CRITIC))
    for stage in (HARD, MORE, CRITIC):
        for run in stages.planned(stage, tmp_path):
            write_run(run, 0.5)
    records = decision.Records(tmp_path)
    rows = decision.updates(records.results("hard")).set_index("label")["loss scale"]
    assert rows[["LUFFY", "AR3PO"]].isna().all()
    assert list(rows[["GRPO", "BAPO", "BAPO, one of 8 counts"]]) == pytest.approx([1 - 100 / 400] * 3)
    assert decision.updates(records.results("critic"))["loss scale"].isna().all()


def test_probes_of_part_4(tmp_path, monkeypatch):
    """The fresh groups are there as well, because they are the unit. A learning rate is a setting."""
    monkeypatch.setattr(decision, "STAGES", (AGE,))
    monkeypatch.setattr(stages, "STAGES", (AGE,))
    for run in stages.planned(AGE, tmp_path):
        write_run(run, 0.5)
        lines = [
            {"step": step, "uid": uid, "source": "replayed" if age else "fresh", "age": age, "tv": 0.01 * age,
             "mean": 0.5, "cosine": 0.5, "norm": 2.0}
            for step in (9, 17) for age in range(8) for uid in (20 * age, 20 * age + 1) if age or uid % 2 == 0
        ]  # fmt: skip
        (run.folder / "probes.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    records = decision.Records(tmp_path)
    probes = records.probes()
    assert probes.groupby(["setting", "seed", "source"]).size().unstack().to_numpy().tolist() == [[2, 28]] * 2
    monkeypatch.setattr(records, "units", pd.DataFrame)
    for name, table in age_or_distance.tables(probes).items():
        assert decision.tables_of(records)[name].equals(table)


# ── the page ──


def test_kept_records_give_the_same_page(records, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decision, "DOCS_IMAGES", tmp_path)
    monkeypatch.setattr(replay_map, "SHARES", [0.0, 0.5, 1.0])
    for run in stages.planned(UNITS, tmp_path):
        write_run(run, 0.5, update=1.0 + run.seed % 10)
        (run.folder / "evaluations.jsonl").unlink()  # they have none
    for run in stages.planned(HARD, tmp_path):
        write_run(run, 0.5)
        (run.folder / "solved.json").write_text('{"solved": 3, "of": 50, "right": {"1 + 1 =": 2}}')
    again = tmp_path / "runs" / "eval" / "hard_base_again"
    again.mkdir(parents=True)
    (again / "solved.json").write_text('{"solved": 1, "of": 50, "right": {"1 + 1 =": 2}}')
    lost = stages.planned(RUNS, tmp_path)[0].folder
    for path in lost.iterdir():
        path.unlink()
    (lost / stages.FAILED).touch()
    assert decision.main(["--runs", str(tmp_path), "--keep"]) == 0
    first = (decision.FOLDER / "decision.md").read_text()
    for part in (
        "Primary comparisons",
        "Updates (runs)",
        "Unit times",
        "Solved of the never solved (hard)",
        "| ahead",
        "Learning rates",
        "| 0.0001 |",
        "base model, asked again |",
    ):
        assert part in first
    assert (tmp_path / "decision_shares.svg").stat().st_size > 5_000
    assert decision.main([]) == 0
    assert (decision.FOLDER / "decision.md").read_text() == first
    assert "Does the filter pay?" in capsys.readouterr().out

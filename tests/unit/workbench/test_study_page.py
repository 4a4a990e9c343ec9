"""The numbers, verdicts and page of a study, from made-up runs; also if most of them are missing."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pandas
import pytest
from made_study import make_arms, make_run, make_study
from page_parts import Page

from bapo_openrlhf.workbench.pages.figure import specification
from bapo_openrlhf.workbench.report.accuracy import HardPrompts, hard_prompts
from bapo_openrlhf.workbench.report.runs import Run, groups_frame
from bapo_openrlhf.workbench.study import claims, data, figures, page, tables
from bapo_openrlhf.workbench.study.data import ROLLOUTS, Results, StudyRun
from bapo_openrlhf.workbench.study.definition import Arm, Claim

PLAIN, BAPO = Arm("plain", "group", "GRPO", {}), Arm("bapo", "group", "BAPO-GRPO", {"adapt.method": "bapo"})
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> {{ 7 * 7 }} ']\"+\x00 \u202e"


def run_of(arm, seed, accuracies, *, rollouts=100, groups=(), steps=4, planned=None, trained=10, **metadata):
    """A run with these held-out accuracies at steps 1, 2, ... on the only benchmark, b. Its totals grow evenly."""
    rows = [
        {"step": step, "rollouts/total": rollouts * step, "tokens/trained_total": trained * step}
        for step in range(1, steps + 1)
    ]
    held_out = [{"step": step, "eval_b_pass1": value} for step, value in enumerate(accuracies, start=1)]
    metadata = {"total_steps": planned or steps, **metadata}
    run = Run(f"{arm.name}-{seed}", rows, metadata, groups_frame(list(groups)), evaluations=held_out)
    return StudyRun(arm, seed, run)


def with_evaluations(run, rows):
    """The run of a study with these evaluations instead."""
    return replace(run, run=replace(run.run, evaluations=rows))


def study_of(*claims_, targets=(), arms=(PLAIN, BAPO), seeds=(1, 2, 3, 4, 5)):
    return make_study(arms, seeds, claims=claims_, targets=targets, evaluations=("b",))


def verdict(claim, runs):
    (result,) = claims.judge(Results(study_of(claim), runs))
    return result


def rows_by_name(table):
    """The rows of a table by their first cell, each as a dictionary by the head."""
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}


ABOVE = Claim("BAPO ends above GRPO", "Table 1", "bapo-group", "plain-group", "accuracy")


def test_bands_are_medians_and_quartiles_where_half_of_the_seeds_are():
    points = ({0: 0.0, 12: 12.0}, {0: 1.0, 5: 1.0}, {0: 2.0, 10: 2.0}, {0: 5.0}, {})
    curves = [pandas.Series(one, dtype=float) for one in points]
    result = data.band(curves)
    assert list(result.index) == [0, 5, 10]  # at 12 only one of four is known, and the empty one does not count
    assert list(result.loc[0, ["low", "median", "high"]]) == list(np.quantile([0, 1, 2, 5], [0.25, 0.5, 0.75]))
    assert list(result.loc[10, ["low", "median", "high"]]) == [4, 6, 8]  # quartiles of 10 and 2
    assert data.band([]).empty and data.band(curves[-1:]).empty


def test_pooled_seeds_are_means_of_metrics_and_all_groups():
    groups = [{"step": 1, "prompt": "p", "mean": 0.0}, {"step": 2, "prompt": "p", "mean": 1.0}]
    rows = [{"step": 1, "x": 1.0, "y": 4}, {"step": 2, "x": None}]
    first = StudyRun(PLAIN, 1, Run("a", rows, {}, groups_frame(groups)))
    rows = [{"step": 1, "x": 3.0}, {"step": 2, "x": 5.0}]
    second = StudyRun(PLAIN, 2, Run("b", rows, {}, groups_frame([{"step": 1, "prompt": "p", "mean": 0.5}])))
    result = Results(study_of(), [first, second]).pooled["plain-group"]
    assert result.name == "GRPO"
    assert result.curve("x").to_dict() == {1: 2.0, 2: 5.0} and result.curve("y").to_dict() == {1: 4.0}
    assert result.groups[["step", "prompt"]].to_numpy().tolist() == [[1, "1 p"], [1, "2 p"], [2, "1 p"]]
    assert hard_prompts(result.groups) == HardPrompts(1, 1, 1, 1)


def test_a_target_is_reached_at_the_first_evaluation_at_or_above_it():
    result = run_of(PLAIN, 1, [0.1, 0.2, 0.15, 0.3], rollouts=50)
    results = Results(study_of(), [result])
    spent = [results.total_at_target(target, ROLLOUTS).to_dict() for target in (0.05, 0.2, 0.21, 0.31)]
    assert spent == [{("plain-group", 1): value} for value in (50, 100, 200)] + [{}]
    before = with_evaluations(result, [{"step": 0, "eval_b_pass1": 0.9}])
    assert Results(study_of(), [before]).total_at_target(0.5, ROLLOUTS).to_list() == [0]


def test_a_place_before_the_first_record_of_a_total_is_left_out():
    rows = [{"step": step, ROLLOUTS: value} for step, value in ((1, None), (2, 20), (3, None), (4, 40))]
    results = Results(study_of(), [StudyRun(PLAIN, 1, Run("a", rows))])
    places = pandas.DataFrame({"arm": "plain-group", "seed": 1, "step": [0, 1, 2, 3, 4.5]})
    assert results.with_total(places, ROLLOUTS).set_index("step")[ROLLOUTS].to_dict() == {0: 0, 2: 20, 3: 20, 4.5: 40}


def test_update_tokens_count_the_epochs():
    epochs = run_of(PLAIN, 1, [], trained=7, config={"train.max_epochs": 3})
    numbers = Results(study_of(), [epochs, run_of(PLAIN, 2, [], trained=7)]).numbers
    assert numbers["update_tokens"].to_list() == [4 * 7 * 3, 28]
    for row in epochs.run.rows[1:]:
        row["demonstrations/tokens"] = 2.0  # worked solutions are trained on too
    assert Results(study_of(), [epochs]).numbers["update_tokens"].to_list() == [(4 * 7 + 3 * 2) * 3]
    for row in epochs.run.rows:
        row["tokens/critic"] = 5.0  # and so does the critic
    results = Results(study_of(), [epochs])
    assert results.numbers["update_tokens"].to_list() == [(4 * 7 + 3 * 2 + 4 * 5) * 3]
    assert "worked solutions and of the critic, times the number of epochs" in tables.costs(results).title


def test_update_tokens_leave_out_the_passes_that_a_gate_spares_the_actor():
    """A model passes 10 of the 12 responses of a step. An epoch has two optimizer steps, and a batch three epochs."""
    run = run_of(PLAIN, 1, [], trained=30, config={"train.max_epochs": 3, "train.batch_size": 8})
    for row, last in zip(run.run.rows, (0, 2, 3, 6), strict=True):  # the optimizer step that was left out
        row |= {"responses/trained": 10, "responses/skipped": 2, "tokens/trained": 30, "tokens/critic": 4}
        row["reuse/tripped_share"] = 1 / last if last else 0.0
    numbers = Results(study_of(), [run, run_of(PLAIN, 2, [], trained=30, config={"train.max_epochs": 3})]).numbers
    critic = 4 * 4 * 3  # a gate does not end its epochs
    assert numbers["update_tokens"].to_list() == pytest.approx([30 * (3 + 1 + 1.5 + 3) + critic, 4 * 30 * 3])


@pytest.mark.parametrize(
    ("method", "last", "trained"), [("bapo", 1, 2), ("bapo", -1, 4), ("bapo", 7, 0), ("none", 1, 4)]
)
def test_update_tokens_leave_out_what_a_frozen_actor_drops(method, last, trained):
    """It is frozen in the first `last` + 1 of 4 steps, and plain OpenRLHF trains on their batches later."""
    run = run_of(PLAIN, 1, [], trained=7, config={"adapt.method": method, "critic.freezing_steps": last})
    results = Results(study_of(), [run, run_of(PLAIN, 2, [], trained=7)])
    assert results.numbers["update_tokens"].to_list() == [7 * trained, 28]
    for row in run.run.rows:
        row["tokens/critic"] = 5.0  # the critic learns in all of them
    assert Results(study_of(), [run]).numbers["update_tokens"].to_list() == [7 * trained + 20]


def test_the_baseline_is_the_plain_method_or_the_first_arm():
    arms = (BAPO, PLAIN, Arm("mopps", "critic", "MoPPS", {}), Arm("dots", "critic", "DOTS", {}))
    results = Results(study_of(arms=arms), [run_of(arm, 1, [0.1]) for arm in arms])
    assert [arm.name for arm in results.arms_of_path("group")] == ["plain-group", "bapo-group"]
    assert [arm.name for arm in results.arms_of_path("critic")] == ["mopps-critic", "dots-critic"]
    without = Results(study_of(arms=arms), [run_of(BAPO, 1, [0.1])])
    assert [arm.name for arm in without.arms_of_path("group")] == ["bapo-group"] and without.paths == ["group"]


def test_labels_that_are_the_same_are_told_apart():
    results = Results(make_study(make_arms(("plain", "mopps"))), [])
    assert set(results.labels.values()) == {"GRPO", "PPO", "MoPPS (group)", "MoPPS (critic)"}
    same = (Arm("a", "group", "X", {}), Arm("b", "group", "X", {}))
    assert Results(study_of(arms=same), []).labels == {"a-group": "X (a-group)", "b-group": "X (b-group)"}


def test_an_interrupted_run_has_no_final_accuracy():
    halfway = run_of(PLAIN, 1, [0.1, 0.9], planned=9)
    results = Results(study_of(seeds=(1, 2)), [halfway])
    assert results.final.empty and results.scores(PLAIN).shape == (0, 1)
    assert results.accuracy[["step", "accuracy"]].to_numpy().tolist() == [[1, 0.1], [2, 0.9]]
    words = " ".join(data.missing(results))
    assert "GRPO, seed 1: stopped at step 4 of 9" in words and "GRPO: no run of seed 2" in words
    assert "BAPO-GRPO: no run of seed 1, 2" in words
    ended = replace(halfway, run=replace(halfway.run, summary={"steps": 4}))
    assert Results(study_of(), [ended]).final.to_numpy().tolist() == [[0.9]]


def sides(ours, theirs, make):
    """Runs of BAPO and of GRPO: make(arm, seed, value) for each value."""
    values = ((BAPO, ours), (PLAIN, theirs))
    return [make(arm, seed, value) for arm, of_arm in values for seed, value in enumerate(of_arm, start=1)]


def accuracies(ours, theirs):
    return sides(ours, theirs, lambda arm, seed, value: run_of(arm, seed, [value]))


def every_run(study, **others):
    return [make_run(*one, **others) for one in study.runs]


@pytest.mark.parametrize(
    ("ours", "holds"),
    [([0.31, 0.33, 0.32], True), ([0.1, 0.12, 0.09], False), ([0.1, 0.4, 0.25], None), ([0.3], None), ([], None)],
)
def test_a_claim_of_higher_accuracy(ours, holds):
    result = verdict(ABOVE, accuracies(ours, [0.2, 0.21, 0.22]))
    assert result.holds is holds
    assert (result.effect.count if result.effect else 0) == len(ours)
    if len(ours) == 3:
        differences = np.array(ours) - [0.2, 0.21, 0.22]
        assert result.effect.value == pytest.approx(differences.mean())
        half = 4.302653 * differences.std(ddof=1) / 3**0.5
        assert result.effect.low == pytest.approx(differences.mean() - half, abs=1e-6)
    assert bool(result.notes) is (len(ours) < 2)


def test_pairs_are_of_the_same_seed():
    runs = [run_of(BAPO, seed, [0.5 + seed / 10]) for seed in (2, 3, 4)]
    runs += [run_of(PLAIN, seed, [0.1 + seed / 10]) for seed in (4, 3, 1)]
    result = verdict(ABOVE, runs)
    assert result.effect.count == 2 and result.effect.value == pytest.approx(0.4)
    assert (result.better, result.than) == (pytest.approx(0.85), pytest.approx(0.45))
    assert result.holds is None and "all pairs differ by the same" in result.notes[0]


def test_about_equal_needs_the_interval_within_the_margin():
    claim = replace(ABOVE, margin=0.05)
    assert verdict(claim, accuracies([0.21, 0.2, 0.215], [0.2, 0.21, 0.22])).holds is True
    assert verdict(claim, accuracies([0.3, 0.31, 0.325], [0.2, 0.21, 0.22])).holds is False
    assert verdict(claim, accuracies([0.1, 0.3, 0.2], [0.2, 0.21, 0.22])).holds is None
    assert verdict(claim, accuracies([0.1, 0.105, 0.12], [0.2, 0.21, 0.22])).holds is False


def rollouts(*ours):
    return sides(ours, [100, 100, 100], lambda arm, seed, value: run_of(arm, seed, [], rollouts=value))


def test_claims_of_rollouts_are_ratios_and_fewer_is_better():
    fewer = replace(ABOVE, measure="rollouts", ratio=0.4)
    result = verdict(fewer, rollouts(40, 44, 41))
    assert result.holds is True and result.effect.value == pytest.approx((0.4 * 0.44 * 0.41) ** (1 / 3))
    assert verdict(fewer, rollouts(140, 144, 141)).holds is False
    assert verdict(fewer, rollouts(100, 100, 100)).holds is False  # exactly as many: not fewer
    assert verdict(fewer, rollouts(50, 200, 100)).holds is None
    halfway = [run_of(BAPO, 4, [], rollouts=1, planned=9), run_of(PLAIN, 4, [], rollouts=100)]
    assert verdict(fewer, [*rollouts(40, 44, 41), *halfway]).effect.count == 3
    equal = replace(fewer, margin=0.1)
    assert verdict(equal, rollouts(100, 101, 99)).holds is True
    assert verdict(equal, rollouts(120, 121, 119)).holds is False


def by_exact_area(points, end):
    """Area under straight lines through the points up to `end`, in exact fractions, divided by `end`."""
    whole = Fraction(0)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 >= end:
            break
        stop = min(x1, end)
        height = y0 + (y1 - y0) * Fraction(stop - x0, x1 - x0)
        whole += (stop - x0) * (y0 + height) / 2
    return whole / end


def test_claims_of_learning_curves_are_at_equal_responses():
    """BAPO generates 150 responses a step and GRPO 100, so GRPO's curve ends first: at 400."""
    curves = [(BAPO, [0.1, 0.3, 0.4, 0.5], 150), (BAPO, [0.2, 0.3, 0.3, 0.6], 150), (PLAIN, [0.1, 0.2, 0.2, 0.3], 100),
            (PLAIN, [0.1] * 4, 100)]  # fmt: skip
    runs = [run_of(arm, 1 + place % 2, heights, rollouts=each) for place, (arm, heights, each) in enumerate(curves)]
    for start in (None, 0.05):
        study = replace(study_of(replace(ABOVE, measure="curve")), start=start)
        (actual,) = claims.judge(Results(study, runs))
        wanted = {}
        for place, (arm, heights, each) in enumerate(curves):
            first = Fraction(str(heights[0] if start is None else start))
            points = [(0, first), *((each * n, Fraction(str(y))) for n, y in enumerate(heights, start=1))]
            wanted[arm.name, 1 + place % 2] = by_exact_area(points, 400)
        assert Results(study, runs).curve(["bapo-group", "plain-group"]).to_dict() == pytest.approx(wanted)
        gain = [wanted["bapo-group", seed] - wanted["plain-group", seed] for seed in (1, 2)]
        assert actual.effect.value == pytest.approx(float(sum(gain) / 2)) and actual.effect.count == 2
        assert claims.effect_in_words(actual)[0] == f"{100 * float(sum(gain) / 2):+.1f} points"
    longer = run_of(Arm("mopps", "group", "MoPPS", {}), 1, [0.5], rollouts=7)  # it is not compared, so 400 stays
    assert Results(study_of(), [*runs, longer]).curve(["plain-group"]).to_dict() == pytest.approx(
        {("plain-group", 1): 0.175, ("plain-group", 2): 0.1}
    )
    assert Results(study_of(), [run_of(PLAIN, 3, [0.1], planned=9)]).curve(["plain-group"]).empty


def test_a_curve_with_several_evaluations_at_one_cost():
    """Steps that train on nothing are evaluated too. By hand: 0.2 up to 64, then 0.7 at 80, where it falls to 0.5."""
    spent = np.array([64.0, 80.0, 80.0, 144.0])
    results = Results(study_of(), [run_of(PLAIN, seed, [0.2, 0.7, 0.5, 0.3], rollouts=1) for seed in (1, 2)])
    for seed, first in ((1, spent), (2, spent - 64)):  # the second one begins with an evaluation without a cost
        results.steps.loc[results.steps["seed"] == seed, "cost"] = first
    heights = results.curve(["plain-group"], "cost")
    assert heights["plain-group", 1] == pytest.approx((64 * 0.2 + 16 * 0.45) / 80)
    assert heights["plain-group", 2] == pytest.approx((16 * 0.45 + 64 * 0.4) / 80)
    results.steps.loc[results.steps["seed"] == 2, "cost"] = 0.0
    heights = results.curve(["plain-group"], "cost")
    assert heights.to_dict() == {("plain-group", 1): pytest.approx((64 * 0.2 + 16 * 0.45 + 64 * 0.4) / 144)}


def solving(arm, seed, right):
    """A run with four prompts: none of them is solved at first, and `right` of them are solved later."""
    solved = {1: 0, 2: right, 3: 0}  # and forgotten again
    groups = [{"step": step, "prompt": str(k), "mean": float(k < count), "responses": 8, "source": "fresh"}
              for step, count in solved.items() for k in range(4)]  # fmt: skip
    return run_of(arm, seed, [], groups=groups)


def test_claims_of_solved_prompts():
    runs = [solving(BAPO, 1, 3), solving(BAPO, 2, 4), solving(BAPO, 3, 3), run_of(BAPO, 4, [])]
    runs += [solving(PLAIN, 1, 1), solving(PLAIN, 2, 0), solving(PLAIN, 3, 0), solving(PLAIN, 4, 1)]
    result = verdict(replace(ABOVE, measure="solved"), runs)
    assert result.effect.value == pytest.approx((0.5 + 1 + 0.75) / 3) and result.effect.count == 3
    assert result.holds is True


def test_a_claim_about_an_arm_that_is_not_there():
    result = verdict(replace(ABOVE, better="nothing-group"), accuracies([0.1], [0.2]))
    assert result.holds is None and "nothing-group" in result.notes[0]


def test_the_tests_against_the_baseline():
    others = [Arm(name, "group", name, {}) for name in "xy"]
    runs = [run_of(PLAIN, seed, [0.2]) for seed in (1, 2, 3)]
    runs += [run_of(others[0], seed, [0.2 + seed / 100]) for seed in (1, 2, 3)]
    runs += [run_of(others[1], seed, [0.2 + (-1) ** seed / 100]) for seed in (1, 2, 3)]
    (table,) = tables.tests(Results(study_of(arms=(PLAIN, *others)), runs))
    rows = rows_by_name(table)
    assert rows["x"]["difference, points"] == "+2.0 [-0.5, +4.5]" and rows["x"]["better / equal / worse"] == "3 / 0 / 0"
    assert (rows["x"]["p"], rows["x"]["p, Holm"]) == ("0.250", "0.500")
    assert (rows["y"]["p"], rows["y"]["p, Holm"], rows["y"]["b, points"]) == ("1.000", "1.000", "-0.3")
    assert "no p is below 0.25" in table.title and "with 2 arms, none is below 0.5" in table.title


def test_one_pair_has_no_p_and_rounding_is_no_difference():
    """0.3 in percent is not three times 0.1 in percent. Three pairs beside the one are one test and not two."""
    other, third = (Arm(name, "group", name, {}) for name in "xy")
    runs = [run_of(PLAIN, 1, [0.1 + 0.1 + 0.1 - 0.1]), run_of(other, 1, [0.2])]
    (table,) = tables.tests(Results(study_of(arms=(PLAIN, other)), runs))
    (row,) = rows_by_name(table).values()
    assert (row["pairs"], row["better / equal / worse"], row["p"], row["p, Holm"]) == (1, "0 / 1 / 0", "–", "–")
    assert row["difference, points"] == row["b, points"] == "+0.0"  # no minus before a zero
    assert "no p is below" not in table.title
    runs += [run_of(arm, seed, [0.2 + rise * seed]) for seed in (1, 2, 3) for arm, rise in ((PLAIN, 0), (third, 0.01))]
    (table,) = tables.tests(Results(study_of(arms=(PLAIN, other, third)), runs[1:]))
    rows = rows_by_name(table)
    assert [(rows[name]["p"], rows[name]["p, Holm"]) for name in "xy"] == [("–", "–"), ("0.250", "0.250")]


def test_summary_has_the_tables_as_markdown():
    runs = [run_of(PLAIN, seed, [0.2], rollouts=1000) for seed in (1, 2, 4)]
    runs += [run_of(BAPO, 1, [0.3], rollouts=1500)]  # a step, of 4
    text = page.summary(Results(study_of(ABOVE), runs), {"commit": "0123abc", "versions": {"torch": "2"}})
    titles = re.findall("^## (.*)", text, re.M)
    assert titles == ["Arms", "What the arms spent", "Claims", "Where the groups came from", "Seconds", "Runs"]
    missing = ("- GRPO: no run of seed 3, 5.\n", "- BAPO-GRPO: no run of seed 2, 3, 4, 5.\n")
    for words in ("- commit: 0123abc\n", *missing, "3 of 5", "4,000", "6,000", "+10.0 points"):
        assert words in text
    assert "versions" not in text


def test_what_was_spent_until_the_target():
    runs = [run_of(PLAIN, 1, [0.1, 0.3]), run_of(PLAIN, 2, [0.3]), run_of(PLAIN, 3, [0.1])]
    runs += [run_of(BAPO, 1, [0.3], config={"train.max_epochs": 2}), run_of(BAPO, 2, [0.1, 0.3])]
    rows = rows_by_name(tables.target_costs(Results(study_of(targets=(0.3,)), runs), 0.3))
    assert rows["GRPO"]["seeds that got there"] == "2 of 3"
    assert rows["GRPO"]["responses generated, median"] == 150 and rows["GRPO"]["update tokens, median"] == 15
    assert rows["BAPO-GRPO"]["update tokens, median"] == 20
    assert rows["BAPO-GRPO"]["responses, ratio to the baseline"].startswith("× 1.00 [")  # 1/2 and 2
    assert rows["BAPO-GRPO"]["pairs"] == 2


def test_the_overview_leaves_out_what_is_not_finished():
    runs = [run_of(PLAIN, 1, [0.2]), run_of(PLAIN, 2, [0.4]), run_of(PLAIN, 3, [0.9], planned=9, rollouts=999)]
    for seconds, run in zip((2, 4, 99), runs, strict=True):
        run.run.rows[0]["timing/generation"] = seconds
    results = Results(study_of(), runs)
    row = rows_by_name(tables.overview(results))["GRPO"] | rows_by_name(tables.costs(results))["GRPO"]
    assert row["seeds"] == "2 of 5" and row["b, %"] == "30.0" and row["responses generated"] == 400
    assert row["final accuracy, mean of the benchmarks, %"].startswith("30.0 [")
    assert results.seconds.loc["plain-group", "generation"] == pytest.approx(3)


def layers(figure):
    return specification(figure.chart)["layer"]


def test_many_arms_are_shared_out_over_charts_with_their_baseline():
    arms = make_arms(paths=("group",))
    results = Results(make_study(arms), [make_run(arm, 1, steps=3) for arm in arms])
    parts = figures.few_arms(results)
    assert all(of_part[0].method == "plain" and len(of_part) <= 1 + figures.FEW for _, of_part in parts)
    assert [arm.name for _, of_part in parts for arm in of_part[1:]] == [arm.name for arm in arms[1:]]
    drawn = figures.arms_over_steps(results, "entropy_loss")
    (domain,) = {tuple(layer["encoding"]["y"]["scale"]["domain"]) for chart in drawn for layer in layers(chart)}
    assert domain == (0, max(cell for chart in drawn for row in chart.table.rows for cell in row[1:]))
    for chart in drawn:
        assert len({(key.colour, key.dash) for key in chart.keys}) == len(chart.keys)


def test_the_first_chart_has_all_arms_with_intervals():
    study = make_study()
    results = Results(study, every_run(study))
    first, *_ = page.build(results, {})
    (drawn,) = first.figures
    assert [row[0] for row in drawn.table.rows] == [results.labels[arm.name] for arm in results.arms]
    for arm, (_, mean, low, high) in zip(results.arms, drawn.table.rows, strict=True):
        ends = 100 * results.scores(arm).mean(axis=1)
        half = 4.302653 * ends.std(ddof=1) / 3**0.5  # Student's t of 3 seeds
        assert (mean, low, high) == pytest.approx((ends.mean(), ends.mean() - half, ends.mean() + half), abs=1e-5)
    without = Results(study, [make_run(arm, 1, evaluations=False) for arm in study.arms])
    rewards = without.numbers["reward_end"]
    assert [row[1] for row in figures.outcome(without).table.rows] == [rewards[arm.name, 1] for arm in without.arms]
    assert figures.outcome(Results(study, [make_run(study.arms[0], 1, planned=99)])).chart is None


def test_curves_share_axes_and_show_the_band():
    study = make_study()
    results = Results(study, every_run(study))
    drawn = figures.accuracy_curves(results)
    assert [key.name for key in drawn[0].keys] == ["GRPO", "BAPO-GRPO", "MoPPS (group)"] and len(drawn) == 2
    for axis in "xy":
        assert len({json.dumps(layer["encoding"][axis]["scale"]) for chart in drawn for layer in layers(chart)}) == 1
    spec = specification(drawn[0].chart)
    band = spec["datasets"][spec["layer"][1]["data"]["name"]]
    low, median, high = np.quantile(100 * results.scores(BAPO).mean(axis=1), [0.25, 0.5, 0.75])
    assert (band[-1]["y"], drawn[0].table.rows[-1][2], band[-1]["high"]) == pytest.approx((low, median, high))


def test_over_what_was_spent_a_curve_keeps_its_points():
    runs = [run_of(BAPO, seed, [0.1, 0.2 + seed / 100], rollouts=value) for seed, value in ((1, 10), (2, 12), (3, 50))]
    (drawn,) = figures.accuracy_curves(Results(study_of(arms=(BAPO,), seeds=(1, 2, 3)), runs), ROLLOUTS)
    places, medians = zip(*((row[0], row[1]) for row in drawn.table.rows), strict=True)
    assert places == (12, 24) and medians == pytest.approx((10, 22))  # medians of 10, 12, 50 and of 20, 24, 100


def test_a_seed_that_stopped_makes_no_total_smaller():
    """It counts up to its last step: the others had spent 30 and 40 by steps 3 and 4."""
    stopped = run_of(BAPO, 1, [0.1, 0.2], rollouts=10, steps=2, planned=4)
    whole = [run_of(BAPO, seed, [0.1, 0.2, 0.3, 0.4], rollouts=10) for seed in (2, 3)]
    (drawn,) = figures.accuracy_curves(Results(study_of(arms=(BAPO,), seeds=(1, 2, 3)), [stopped, *whole]), ROLLOUTS)
    assert [row[0] for row in drawn.table.rows] == [10, 20, 30, 40]


def test_an_arm_is_its_files_and_its_flags():
    arm = replace(BAPO, config=("/a/more.yaml",), flags={"ds.packing_samples": None, "adam.betas": [0, 1], "seed": 3})
    table = tables.arms(Results(study_of(arms=(arm, replace(PLAIN, flags={}))), [run_of(arm, 1, ())]))
    assert [row[-1] for row in table.rows] == ["--config more.yaml --ds.packing_samples --adam.betas 0 1 --seed=3", "–"]


def test_a_phase_that_an_arm_does_not_have_has_no_time():
    runs = [run_of(PLAIN, 1, []), run_of(BAPO, 1, [])]
    for run, phases in zip(runs, (("generation",), ("generation", "adapt")), strict=True):
        for row in run.run.rows:
            row |= {f"timing/{phase}": 0.5 for phase in phases}
    table = tables.seconds(Results(study_of(), runs))
    adapt = table.head.index("batch adaptation")
    assert [row[adapt] for row in table.rows] == ["–", "2 s"]  # 4 steps
    runs[1].run.metadata["total_steps"] = 5  # it has not ended
    assert [row[1] for row in tables.seconds(Results(study_of(), runs)).rows] == ["2 s (× 1.00)", "–"]


def test_text_is_shown_as_text():
    """All else that makes a page is the report's too, and tested there."""
    study = make_study(make_arms(("plain", "bapo")), seeds=(1, 2))
    study = replace(study, name=f"study {HOSTILE}", arms=(*study.arms, Arm("x", "group", HOSTILE, {"a.b": HOSTILE})))
    provenance = {"commit": HOSTILE, "versions": {}}
    result = Page(page.make_study_page(Results(study, every_run(study, steps=6)), provenance))
    assert result.all("script") == [] and "\x00" not in result.text and "owned" in result.words("h1")[0]
    assert result.words("h2")[:3] == ["Outcome", "Claims", "At a glance"]


def test_verdicts_are_plain_and_on_top(undrawn):
    study = make_study()
    runs = [make_run(arm, seed, gain=0.1 * (arm.method == "bapo")) for arm in study.arms for seed in study.seeds]
    result = Page(page.make_study_page(Results(study, runs), {}))
    verdicts = [words for words in result.words("li") if re.match("Holds|Does not hold|Undecided", words)]
    assert len(verdicts) == 3 and verdicts[0].startswith("Holds: BA-PPO ends above PPO (A.9).")
    assert "3 pairs" in verdicts[0] and "95 % interval" in verdicts[0]


@pytest.mark.parametrize("make", [
    lambda study: [],
    lambda study: [make_run(study.arms[1], 2, steps=1)],
    lambda study: every_run(study, groups=False),
    lambda study: [StudyRun(*one, Run("r", [{"step": 1}])) for one in study.runs],
])  # fmt: skip
def test_the_page_of_an_unfinished_study(undrawn, make):
    study = make_study()
    runs = make(study)
    assert f"{len(runs)} of 18 runs are there" in Page(page.make_study_page(Results(study, runs), {})).words("body")[0]


@pytest.fixture
def two_arms():
    study = make_study(make_arms(("plain", "bapo"), ("group",)))
    return study, every_run(study)


def test_values_that_are_no_numbers(undrawn, two_arms):
    study, runs = two_arms
    spoiled = [{key: value if key == "step" else None for key, value in row.items()} for row in runs[0].run.rows]
    runs[0] = replace(runs[0], run=replace(runs[0].run, rows=spoiled))
    rows = [row | {"eval_cd4_pass1": float("nan")} for row in runs[1].run.evaluations]
    runs[1] = with_evaluations(runs[1], rows)
    words = Page(page.make_study_page(Results(study, runs), {})).words("main")[0]
    assert "BAPO-GRPO: no final accuracy of seed 1." in words and "nan" not in words.lower().split()


def test_an_accuracy_that_is_not_that_of_the_end_is_named(two_arms):
    study, runs = two_arms
    rows = runs[0].run.evaluations
    assert rows[-1]["step"] == runs[0].run.last_step == 12 and not data.missing(Results(study, runs))
    runs[0] = with_evaluations(runs[0], rows[:-1])
    (said,) = data.missing(Results(study, runs))
    assert said.startswith("GRPO, seed 1: ") and "after step 9 of 12" in said


def test_evaluations_that_lack_a_benchmark(undrawn, two_arms):
    study, runs = two_arms
    rows = [[{k: v for k, v in row.items() if "cd4" not in k} for row in run.run.evaluations] for run in runs]
    result = Results(study, [*map(with_evaluations, runs, rows)])
    assert "cd4 is in none" in result.why_no_accuracy
    words = Page(page.make_study_page(result, {})).words("main")[0]
    assert f"No run has a final accuracy: {result.why_no_accuracy}." in words


@pytest.mark.filterwarnings("error")
def test_a_study_that_names_no_evaluations(undrawn, two_arms):
    """Its runs did evaluate."""
    study, runs = two_arms
    result = Results(replace(study, evaluations=()), runs)
    assert result.final.empty and tables.tests(result) == []
    assert [row[3] for row in tables.overview(result).rows] == ["–", "–"]
    words = Page(page.make_study_page(result, {})).words("main")[0]
    assert "No run has a final accuracy: the study names no evaluations." in words

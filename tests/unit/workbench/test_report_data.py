"""The numbers of the report's figures, against brute force."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.page import step_ranges
from bapo_openrlhf.workbench.report import accuracy, answers, conditions, opening, tables
from bapo_openrlhf.workbench.report.figures import Comparison
from bapo_openrlhf.workbench.report.runs import Run, groups_frame

G = 4


@st.composite
def records(draw):
    """Groups of a few prompts over a few steps, as in groups.jsonl."""
    rows = []
    for step in range(1, draw(st.integers(1, 6)) + 1):
        fresh = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5))
        again = draw(st.lists(st.sampled_from("abcdef"), max_size=3))
        for source, prompts in (("fresh", fresh), ("reevaluated", again)):
            for prompt in prompts:
                mean = draw(st.sampled_from([None, *(k / G for k in range(G + 1))]))
                rows.append({
                    "step": step, "uid": len(rows), "prompt": prompt, "source": source, "mean": mean, "responses": G,
                    "state": "failed" if mean is None else "fresh", "tokens": 7,
                })  # fmt: skip
    return rows


def run_of(rows=(), groups=(), answers=(), **config):
    return Run("run", list(rows), {"config": config} if config else {}, groups_frame(groups), list(answers))


@given(records(), st.randoms())
def test_a_group_with_a_prefix_says_nothing_of_its_prompt(rows, random):
    marked = [row | ({"source": "prefixed", "prefix_tokens": 3} if random.random() < 0.4 else {}) for row in rows]
    assert list(groups_frame(marked).get("uid", [])) == [row["uid"] for row in marked if row["source"] != "prefixed"]


def test_a_curve_has_the_finite_numbers_and_over_another_metric_the_steps_that_have_both():
    values = [0.5, None, float("nan"), float("inf"), True, "x", 2]
    rows = [{"step": step, "a": value} for step, value in enumerate(values, start=1)] + [{"step": 8}]
    assert run_of(rows).curve("a").to_dict() == {1: 0.5, 7: 2.0} and run_of(rows).total("a") == 2.5
    assert run_of(rows).curve("b").empty and run_of(rows).total("b") == 0
    both = run_of(
        [{"step": 1, "a": 1, "b": 10}, {"step": 2, "a": 2}, {"step": 3, "b": 3}, {"step": 4, "a": 4, "b": 40}]
    )
    assert both.curve("a", over="b").to_dict() == {10: 1, 40: 4} and both.curve("a", over="c").empty


def test_seconds_add_up_until_one_is_missing():
    rows = [{"step": k, "timing/step_total": seconds} for k, seconds in enumerate((1800, 5400, None, 60), start=1)]
    assert run_of(rows).curve("seconds").to_dict() == {1: 1800, 2: 7200}
    assert run_of([{"step": 1}]).curve("seconds").empty


def latest(groups, step):
    """Bins of each prompt's groups until a step, oldest first."""
    result = {}
    for group in groups:
        if group["step"] <= step and group["mean"] is not None:
            result.setdefault(group["prompt"], []).append(round(group["mean"] * G))
    return result


@given(records())
def test_passes_against_counting_again_from_the_start(groups):
    frame = groups_frame(groups)
    if frame["mean"].isna().all():  # such a run has no bins
        return
    actual = accuracy.passes(frame)
    prompts = len({group["prompt"] for group in groups if group["source"] == "fresh"})
    expected = [("first", [bins[0] for bins in latest(groups, 99).values()])]
    ended, steps = 0, sorted({group["step"] for group in groups})
    for step in steps:
        fresh = sum(group["source"] == "fresh" and group["step"] <= step for group in groups)
        if fresh // prompts > ended or step == steps[-1]:
            name = str(fresh // prompts) if fresh // prompts > ended else f"{fresh / prompts:.1f}"
            ended = fresh // prompts
            expected.append((name, [bins[-1] for bins in latest(groups, step).values()]))
    kept = [expected[0], *(expected[1:][place] for place in accuracy.evenly(len(expected) - 1, accuracy.MAX_PASSES))]
    assert list(actual.index) == [name for name, _ in kept]
    assert actual.to_numpy().tolist() == [[bins.count(k) for k in range(G + 1)] for _, bins in kept]
    assert actual.index.is_unique


@given(st.integers(1, 200), st.integers(1, 20))
def test_evenly_spaced_places_end_with_the_last(count, most):
    result = accuracy.evenly(count, most)
    assert result[-1] == count - 1 and len(result) == len(set(result)) == min(count, most)
    gaps = np.diff([-1, *result])
    assert max(gaps) - min(gaps) <= 1 or count <= most


@given(records())
def test_migration_against_counting_again_from_the_start(groups):
    result = accuracy.migration(groups_frame(groups))
    cells = Counter((bins[0], bins[-1]) for bins in latest(groups, 99).values() if len(bins) > 1)
    assert result.to_numpy().tolist() == [[cells[row, column] for column in range(G + 1)] for row in range(G + 1)]
    assert accuracy.movement(result) == (
        sum(count for (row, column), count in cells.items() if column < row),
        sum(count for (row, column), count in cells.items() if column == row),
        sum(count for (row, column), count in cells.items() if column > row),
    )


@given(records())
def test_unlocked_prompts(groups):
    hard = [bins for bins in latest(groups, 99).values() if bins[0] == 0]
    assert accuracy.hard_prompts(groups_frame(groups)) == accuracy.HardPrompts(
        len(hard),
        sum(len(bins) > 1 for bins in hard),
        sum(any(bins) for bins in hard),
        sum(bins[-1] > 0 for bins in hard),
    )


def test_unlocked_prompts_are_a_share_of_those_that_were_asked_again():
    """The paper has three passes, so a shorter run is not compared with it."""

    def told(*passes):  # each with the means of three prompts, or of fewer
        fresh = {"source": "fresh", "responses": 2}
        rows = [{"step": s, "prompt": p, "mean": m, **fresh} for s, row in enumerate(passes) for p, m in enumerate(row)]
        return accuracy.hard_prompts_in_words(groups_frame(rows))

    assert told((1.0, 0.5, 0.5)) == ""
    assert "none of them was asked again" in told((0.0, 0.0, 0.0))
    two = told((0.0, 0.0, 0.0), (0.5, 0.0))
    assert "solved 1 of these (50%), the latest group 1 (50%)" in two and "paper" not in two
    three = told((0.0, 0.0, 0.0), (0.5, 0.0, 1.0), (0.0, 0.0, 0.0))
    assert "solved 2 of these (67%), the latest group 0 (0%). In the paper, 3 passes " in three


def test_a_prompt_is_in_the_bin_that_is_nearest_if_rewards_are_between_0_and_1():
    means = {"a": 0, "b": 1, "c": 0.125, "d": 0.0624, "e": 0.5}
    groups = [{"step": 1, "prompt": p, "source": "fresh", "mean": mean, "responses": 8} for p, mean in means.items()]
    assert accuracy.passes(groups_frame(groups)).loc["first"].tolist() == [2, 1, 0, 0, 1, 0, 0, 0, 1]
    for means, fit in (((0, None, 1), True), ((-0.1,), False), ((1.5,), False)):
        assert bool(accuracy.why_no_bins(run_of(groups=[{"mean": mean} for mean in means]))) is not fit


def test_every_group_has_its_end():
    row = {"step": 1, "groups/fresh": 3, "groups/filtered": 4, "groups/failed": 1, "groups/generated": 8}
    metrics = row | {"filtered/none_right": 1, "filtered/all_right": 2, "filtered/by_draw": 1}
    ends = {"fresh": 3, "none_right": 1, "all_right": 2, "by_draw": 1, "failed": 1}
    assert tables.outcomes_of(run_of([metrics])) == ends
    assert tables.outcomes_of(run_of([row, row])) == {"fresh": 6, "filtered": 8, "failed": 2}


def test_cost_is_the_sum_of_the_steps_and_the_last_of_what_adds_up():
    rows = [
        {"step": 1, "rollouts/total": 8, "timing/generation": 2.0, "timing/step_total": 3.0, "groups/fresh": 2},
        {"step": 2, "rollouts/total": 24, "timing/generation": 1.0, "timing/ppo_train": 4.0, "timing/step_total": 5.0,
         "groups/fresh": 1, "groups/replayed": 1, "tokens/generated_total": 90, "tokens/trained_total": 40},
    ]  # fmt: skip
    run = run_of(rows)
    assert list(tables.cost_of(run).values()) == [2, 24, 90, 40, 4, 8.0]
    assert record.phase_seconds(run.rows) == {"generation": 3.0, "step_total": 8.0, "ppo_train": 4.0}
    shown = [row[0] for row in tables.cost(Comparison([run_of([{"step": 1, "timing/new": 1.0}])])).rows]
    assert shown[-1] == "time: new" and "time: step_total" not in shown
    assert list(tables.cost_of(run_of([{"step": 1}])).values()) == [1, None, None, None, 0, None]
    rows[0]["demonstrations/tokens"] = rows[1]["demonstrations/tokens"] = 5
    assert tables.cost_of(run_of(rows, **{"train.max_epochs": 2}))["tokens trained on"] == 2 * (40 + 5 + 5)


def test_what_was_spent_until_a_reward_was_reached():
    run = run_of([{"step": k, "rollouts/total": 10 * k, "reward/fresh_mean": k / 10} for k in range(1, 10)])
    assert opening.spent_until(run, "rollouts/total", 0.5) == 50
    assert opening.spent_until(run, "rollouts/total", 0.85) == 90  # the mean of the last two: 0.8 and 0.9
    assert opening.spent_until(run, "rollouts/total", 0.86) is None and opening.spent_until(run, "seconds", 0.1) is None


def theory_rows(count=4, **changes):
    rows = [
        {"step": k, "theory/k1": 2.0, "theory/k2": 2.0, "theory/k3": 1.2, "threshold/c2": 0.2, "threshold/c3": 0.4,
         "tv/fresh": 0.1 * k, "shift/fresh": 1e-4 * k, "tv/replayed": 0.05, "reward/fresh_mean": 0.5,
         "reward/outside_range": 0.0}
        for k in range(1, count + 1)
    ]  # fmt: skip
    for key, values in changes.items():
        for row, value in zip(rows, values, strict=True):
            row[key] = value
    return rows


FLAGS = {"adapt.c1": "1/8", "adapt.filter": "range", "adapt.method": "bapo", "adapt.max_shift_fresh": 2.5e-4}


def judged(rows, groups=(), **config):
    """By a word of the condition: whether it held, and the steps at which it did not."""
    result = conditions.conditions(run_of(rows, groups, **(FLAGS | config)))
    words = ("Rewards", "c1 is above", "c2 and c3", "on X1", "on X3", "X2 was", "K1, K2", "range filter", "at most 1/G")
    assert all(word in one.what for word, one in zip(words, result, strict=True))
    return {word: (one.held, list(one.steps)) for word, one in zip(words, result, strict=True)}


def test_conditions_name_the_steps_where_they_did_not_hold():
    result = judged(theory_rows())
    assert result["on X1"] == (False, [3, 4])  # 3e-4 and 4e-4 against 2.5e-4
    assert result["on X3"] == (None, [])  # no limit
    assert result["X2 was"] == (None, [])  # no step trained on it
    assert result["Rewards"] == result["c1 is above"] == result["c2 and c3"] == result["K1, K2"] == (True, [])
    assert result["range filter"] == (True, [])
    assert result["at most 1/G"] == (None, [])  # G is not known without groups
    assert judged(theory_rows(), **{"adapt.max_shift_fresh": 4e-4})["on X1"] == (True, [])  # the limit is allowed
    older = [{key: value for key, value in row.items() if key != "shift/fresh"} for row in theory_rows()]
    assert judged(older, **{"adapt.max_shift_fresh": None, "adapt.max_tv_fresh": 0.25})["on X1"] == (None, [])
    nothing = {f"theory/k{number}": None for number in (1, 2, 3)}  # of a method that the theorem does not cover
    for constants in ({}, nothing):
        assert conditions.conditions(run_of([{"step": 1, "reward/fresh_mean": 0.5, **constants}])) == []


def test_responses_to_hard_prompts_may_be_of_an_earlier_policy():
    """With --train.async_enable. Otherwise their shift is exactly 0."""
    changes = {"tv/reevaluated": [0.1] * 4, "shift/reevaluated": [0.0, 0.02, 0.0, 0.0]}
    assert judged(theory_rows(**changes))["X2 was"] == (False, [2])
    assert judged(theory_rows(**changes | {"shift/reevaluated": [0.0] * 4}))["X2 was"] == (True, [])


def test_thresholds_must_be_inside_and_in_order_and_constants_finite_and_positive():
    for c2, c3, steps in (((0.2, 0.2, 0.2, 0.2), (0.4, 0.2, 0.1, 0.4), [2, 3]),
                          ((0.0, 0.1, 0.1, 0.1), (0.4, 0.4, 1.0, 0.4), [1, 3])):  # fmt: skip
        assert judged(theory_rows(**{"threshold/c2": c2, "threshold/c3": c3}))["c2 and c3"] == (False, steps)
    rows = theory_rows(**{"theory/k2": (2.0, None, -1.0, 0.0)})
    assert judged(rows)["K1, K2"] == (False, [2, 3, 4])
    for c1 in ("0", "1"):
        assert judged(rows, **{"adapt.c1": c1})["c1 is above"] == (False, [1, 2, 3, 4])


def test_k1_and_k2_say_when_they_do_not_apply():
    groups = [{"step": 1, "prompt": "a", "mean": 0.5, "responses": 8}]
    assert judged(theory_rows(), groups)["at most 1/G"] == (True, [])
    assert judged(theory_rows(), groups, **{"adapt.c1": "2/8"})["at most 1/G"][0] is False
    assert judged(theory_rows(), **{"adapt.filter": "none"})["range filter"] == (False, [1, 2, 3, 4])


def test_rewards_outside_are_found_by_step():
    groups = [{"step": step, "prompt": "a", "mean": mean, "responses": 8} for step, mean in ((1, 1), (2, 1.5), (3, -1))]
    assert judged(theory_rows(), [*groups, groups[1]])["Rewards"] == (False, [2, 3])


@pytest.mark.parametrize(("means", "shares", "steps", "note"), [
    ((0.45, 0.45), (0.25, 0), [1], "judged by the group means and the fresh responses"),  # 1.5, 0.1, 0.1, 0.1
    ((0.45, 1.5), (0, 0), [2], "judged by the group means and the fresh responses"),  # a hard prompt's
    ((), (0, 0.25), [2], "judged by the fresh responses"),
    ((), (0, 0), [], "judged by the fresh responses"),
])  # fmt: skip
def test_rewards_outside_are_found_one_by_one(means, shares, steps, note):
    rows = theory_rows(2, **{"reward/outside_range": shares, "reward/fresh_mean": (-0.5, -0.5)})  # from -1 to 1
    groups = [{"step": step, "prompt": "a", "mean": mean, "responses": 4} for step, mean in enumerate(means, start=1)]
    condition = conditions.conditions(run_of(rows, groups, **FLAGS))[0]
    assert (condition.held, list(condition.steps), condition.note) == (not steps, steps, note)


@given(st.sets(st.integers(1, 60), min_size=1))
def test_step_ranges_say_the_first_steps_and_count_the_others(steps):
    text, _, more = step_ranges(steps).partition(" and ")
    ranges = [(int(low), int(high or low)) for low, high in re.findall(r"(\d+)(?:–(\d+))?", text)]
    told = [step for low, high in ranges for step in range(low, high + 1)]
    assert told == sorted(steps)[: len(told)] and len(told) + int(more.removesuffix(" more") or 0) == len(steps)
    assert len(ranges) == min(8, sum(step - 1 not in steps for step in steps))  # steps in a row are one range


def answer(prompt, kind, step, text="text"):
    reward = float(kind == "solved")
    return {"step": step, "prompt": prompt, "kind": kind, "text": text, "label": 7, "response": "r", "reward": reward}


def test_prompts_that_were_solved_after_a_failure_and_those_that_never_were():
    told = [
        answer("a", "failed", 1), answer("b", "failed", 1), answer("c", "failed", 2), answer("d", "failed", 3),
        answer("b", "solved", 4), answer("a", "solved", 9), answer("e", "failed", 5),
    ]  # fmt: skip
    means = {"a": (0, 0, 1), "b": (0, 0.5), "c": (0,), "d": (1, 0, 0), "e": (0, 0, None, 0)}
    groups = [{"prompt": prompt, "mean": mean} for prompt, values in means.items() for mean in values]
    run = run_of(groups=groups, answers=told)
    newly = [(one.failed["prompt"], one.solved["step"], one.groups) for one in answers.newly_solved(run)]
    assert newly == [("a", 9, 3), ("b", 4, 2)]
    # d was solved before it failed; e was tried more often than c
    assert [(one.failed["prompt"], one.groups) for one in answers.never_solved(run)] == [("e", 3), ("c", 1)]
    later, never = answers.listings(run, "")
    assert never.entries[0].texts[1] == ("Label", "label", "7")
    # A group that failed is one without a reward, so no reward of 0 is called so.
    assert "failed" not in later.entries[0].what.lower() + later.entries[0].texts[2][0].lower()
    without_groups = answers.never_solved(run_of(answers=told))
    assert [(one.failed["prompt"], one.groups) for one in without_groups] == [("c", None), ("d", None), ("e", None)]


@given(
    st.text("ab", max_size=4), st.lists(st.text("abc", max_size=4), min_size=2, unique=True), st.text("ab", max_size=4)
)
def test_what_tells_texts_apart(start, middles, end):
    texts = [start + middle + end for middle in middles]
    parts = answers.telling_parts(texts)
    cut = len(texts[0]) - len(parts[0])
    left = next(n for n in range(cut + 1) if texts[0][n:].startswith(parts[0]) and rebuilt(texts, parts, n, cut - n))
    assert rebuilt(texts, parts, left, cut - left) and len(set(parts)) == len(texts)
    assert "" in parts or (len({part[0] for part in parts}) > 1 and len({part[-1] for part in parts}) > 1)


def rebuilt(texts, parts, left, right):
    """Whether each text is its part between the same beginning and end."""
    start, end = texts[0][:left], texts[0][len(texts[0]) - right :]
    return [start + part + end for part in parts] == texts


def test_alone_a_text_is_told_whole():
    for texts in ([], ["same"], ["same", "same"]):
        assert answers.telling_parts(texts) == texts
    assert answers.telling_parts(["<s>Use 1 2 = 3</s>", "<s>Use 4 5 = 9</s>"]) == ["1 2 = 3", "4 5 = 9"]


def test_the_gap_is_the_mean_of_the_steps_that_measured_it_right_after_a_sync():
    rows = [{"step": step, "gap/kl": kl, "gap/absolute": 10 * kl, "gap/cut_share": 20 * kl, "gap/age": age}
            for step, kl, age in ((2, 1e-4, 0), (3, 1e-4, 1), (4, 2e-4, 0))]  # fmt: skip
    rows.append({"step": 5, "gap/kl": 1e-3, "gap/absolute": None, "gap/cut_share": 0.5, "gap/age": 0})
    for run, said in (
        ([{"step": 1}, *rows], "KL 1.5e-04 a token; log-probs differ by 1.5e-03; 0.30% of tokens would be cut"),
        ([{"step": 1, "tv/fresh": 0.1}], None),  # it measured none
    ):
        facts = dict(tables.overview(Comparison([run_of(run)])).rows)
        assert facts["gap of engine and actor, right after a sync"] == said

"""The map's numbers: unit times by hand, and gains against areas that are summed up in small pieces."""

import numpy as np
import pandas as pd
import pytest
import replay_map

from bapo_openrlhf.workbench.report.runs import Run, groups_frame
from bapo_openrlhf.workbench.study.data import Results, StudyRun
from bapo_openrlhf.workbench.study.definition import Arm, Study

RESPONSES = {"plain": 8, "bapo": 10, "dapo": 16, "recipe": 8, "small": 8}  # in a step
TRAINED = {"plain": 100, "bapo": 50, "dapo": 100, "recipe": 150, "small": 100}  # tokens of a step, which generates 100
USELESS = [("fresh", 0.0, 20), ("fresh", 1.0, 10), ("fresh", 0.5, 70), ("filtered", 0.0, 5)]  # state, mean and tokens
EPOCHS = {"bapo": 2}
UNITS = pd.DataFrame({"response": [0.5, 0.25], "update": [2.0, 3.0]}, index=["plain-group", "bapo-group"])
HEIGHTS = {
    ("plain", 1): 0.3, ("plain", 2): 0.4, ("bapo", 1): 0.5, ("bapo", 2): 0.55,
    ("dapo", 1): 0.6, ("dapo", 2): 0.5, ("recipe", 1): 0.7, ("recipe", 2): 0.65,
    ("small", 1): 0.6, ("small", 2): 0.62,
}  # at the last step  # fmt: skip


def results_of(*methods: str) -> Results:
    arms = tuple(Arm(method, "group", replay_map.REPLAY.get(method, method.upper()), {}) for method in methods)
    runs = []
    groups = groups_frame([
        {"step": step, "uid": 4 * step + place, "prompt": "p", "source": "fresh", "state": state, "mean": mean,
         "responses": 8, "tokens": tokens}
        for step in range(1, 9) for place, (state, mean, tokens) in enumerate(USELESS)
    ])  # fmt: skip
    for arm in arms:
        epochs = EPOCHS.get(arm.method, 1)
        config = {"train.max_epochs": epochs}
        for seed in (1, 2):
            rows = [
                {"step": step, "rollouts/total": RESPONSES[arm.method] * step, "tokens/generated_total": 100 * step,
                 "tokens/trained_total": TRAINED[arm.method] / epochs * step, "timing/step_total": 1.0}
                for step in range(1, 9)
            ]  # fmt: skip
            top = HEIGHTS[arm.method, seed]
            held_out = [{"step": step, "eval_sums_pass1": 0.1 + (top - 0.1) * (step / 8) ** 2} for step in (4, 8)]
            facts = {"total_steps": 8, "config": config}
            runs.append(StudyRun(arm, seed, Run("", rows, facts, groups, evaluations=held_out)))
    results = Results(Study("made", arms, (1, 2), evaluations=("sums",), start=0.1), runs)
    replay_map.add_costs(results, UNITS)
    return results


def height(method: str, seed: int, of_step: float, end: float) -> float:
    """Mean height of a curve up to a cost, by the midpoints of 100,000 pieces. A step costs `of_step`."""
    costs = (np.arange(100_000) + 0.5) / 100_000 * end
    top = HEIGHTS[method, seed]
    return float(np.interp(costs / of_step, [0, 4, 8], [0.1, 0.1 + (top - 0.1) / 4, top]).mean())


@pytest.mark.parametrize(
    ("cost", "of_step"),
    [
        ("responses", {"plain": 8, "bapo": 10}),
        ("tokens", {"plain": 200, "bapo": 150}),
        ("seconds", {"plain": 8 * 0.5 + 2, "bapo": 10 * 0.25 + 3}),
    ],
)
def test_gains_at_equal_cost(cost, of_step):
    [row] = replay_map.gains(results_of("plain", "bapo")).query("cost == @cost").to_dict("records")
    end = 8 * min(of_step.values())
    first, second = (
        100 * (height("bapo", seed, of_step["bapo"], end) - height("plain", seed, of_step["plain"], end))
        for seed in (1, 2)
    )
    assert row["gain"] == pytest.approx((first + second) / 2, abs=1e-3)
    half = 12.7062 * abs(first - second) / 2  # Student's t with one degree of freedom: t s / sqrt(2)
    assert (row["low"], row["high"]) == pytest.approx((row["gain"] - half, row["gain"] + half), abs=0.01)
    assert (row["label"], row["pairs"], row["p"]) == ("BAPO", 2, 0.5)


def test_worked_solutions_cost_what_is_trained_on_them():
    """Two epochs. Plain OpenRLHF has no solutions, and a step may have none."""
    shown = {"plain": (None, None, None), "relift": (30.0, None, 5.0)}
    arms = tuple(Arm(method, "group", method, {}) for method in shown)
    runs = [
        StudyRun(arm, seed, Run("", [
            {"step": step, "rollouts/total": 8 * step, "tokens/generated_total": 100 * step,
             "tokens/trained_total": 40 * step} | ({} if tokens is None else {"demonstrations/tokens": seed * tokens})
            for step, tokens in enumerate(shown[arm.method], 1)
        ], {"config": {"train.max_epochs": 2}}))
        for arm in arms for seed in (1, 2)
    ]  # fmt: skip
    results = Results(Study("made", arms, (1, 2)), runs)
    replay_map.add_costs(results, None)
    found = results.steps.set_index(["arm", "seed"])["cost/tokens"]
    assert list(found["plain-group", 2]) == [100 + 80, 200 + 160, 300 + 240]
    assert list(found["relift-group", 1]) == [100 + 80 + 60, 200 + 160 + 60, 300 + 240 + 70]
    assert list(found["relift-group", 2]) == [100 + 80 + 120, 200 + 160 + 120, 300 + 240 + 140]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_gains_by_the_share_of_generation(share):
    [row] = replay_map.by_share(results_of("plain", "bapo")).query("share == @share").to_dict("records")
    plain, bapo = (100 * share + TRAINED[arm] * (1 - share) for arm in ("plain", "bapo"))
    end = 8 * min(plain, bapo)
    wanted = [height("bapo", seed, bapo, end) - height("plain", seed, plain, end) for seed in (1, 2)]
    assert row["gain"] == pytest.approx(100 * sum(wanted) / 2, abs=1e-3)


def of_share(share: float, trained: float) -> float:
    """Cost of a step that generates 100 tokens."""
    return 100 * share + trained * (1 - share)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_plain_runs_once_more_without_the_costs_of_groups_without_a_signal(share):
    """30 of the 100 tokens that a step of them trains on are in groups that are all right or all wrong."""
    rows = replay_map.shares(results_of("plain", "bapo")).query("share == @share").set_index("label")
    free, plain = of_share(share, 70), of_share(share, 100)
    wanted = [height("plain", seed, free, 8 * free) - height("plain", seed, plain, 8 * free) for seed in (1, 2)]
    label = replay_map.SIMPLE[replay_map.FREE]
    assert rows.loc[label, "gain"] == pytest.approx(100 * sum(wanted) / 2, abs=1e-3)
    before = replay_map.by_share(results_of("plain", "bapo")).query("share == @share").set_index("label")
    assert rows.loc["BAPO", "gain"] == pytest.approx(before.loc["BAPO", "gain"])


def test_replay_beside_the_simplest_alternatives(monkeypatch):
    """The runs of a method that only one study has are compared with the alternatives of the other one."""
    monkeypatch.setattr(replay_map, "SHARES", [share := 0.25])
    studies = {
        "map_centre": results_of("plain", "bapo"),
        "map_near_small": results_of("plain", "recipe"),
        "map_neighbours": results_of("plain", "bapo", "small"),
    }
    table = replay_map.beside_simple(studies)
    free, half = replay_map.SIMPLE[replay_map.FREE], replay_map.SIMPLE["small"]
    found = table[["setting", "label", "against"]].drop_duplicates().itertuples(index=False)
    assert {tuple(row) for row in found} == {
        ("centre", "BAPO", free), ("small batches", "BAPO", free), ("small batches", "BAPO", half),
        ("small batches", "BAPO, all near groups", free), ("small batches", "BAPO, all near groups", half),
    }  # fmt: skip
    of_step = {"bapo": of_share(share, 50), "recipe": of_share(share, 150), "small": of_share(share, 100)}
    for method in ("bapo", "recipe"):
        end = 8 * min(of_step[method], of_step["small"])
        wanted = [height(method, seed, of_step[method], end) - height("small", seed, of_step["small"], end)
                  for seed in (1, 2)]  # fmt: skip
        rows = table[(table["label"] == replay_map.REPLAY[method]) & (table["against"] == half)]
        [row] = rows.to_dict("records")
        assert row["gain"] == pytest.approx(100 * sum(wanted) / 2, abs=1e-3)


def test_pairs_have_the_heights_of_both_runs():
    rows = replay_map.pairs(results_of("plain", "bapo")).to_dict("records")
    assert [(row["label"], row["seed"]) for row in rows] == [("BAPO", 1), ("BAPO", 2)]
    for row in rows:
        wanted = [100 * height(arm, row["seed"], RESPONSES[arm], 64) for arm in ("bapo", "plain")]
        assert [row["height"], row["baseline"]] == pytest.approx(wanted, abs=1e-3)


def test_the_tested_method_is_compared_in_each_study():
    """With two pairs of the same sign, p is 1/2, and 1 after Holm's correction for three comparisons."""
    studies = {
        "first": results_of("plain", "bapo", "dapo", "recipe"),
        "second": results_of("plain", "recipe"),
        "third": results_of("plain"),
    }
    rows = replay_map.confirmation(studies).to_dict("records")
    assert [(row["study"], row["against"]) for row in rows] == [
        ("first", "PLAIN"), ("first", "DAPO"), ("second", "PLAIN")]  # fmt: skip
    for row, other in zip(rows, ("plain", "dapo", "plain"), strict=True):
        wanted = [height("recipe", seed, 8, 64) - height(other, seed, RESPONSES[other], 64) for seed in (1, 2)]
        assert row["gain"] == pytest.approx(100 * sum(wanted) / 2, abs=1e-3)
        assert (row["p"], row["p_holm"]) == (0.5, 1.0)


def test_an_arm_without_unit_times_has_no_answer_at_equal_seconds():
    results = results_of("plain", "bapo", "recipe")
    rows = replay_map.gains(results)
    assert set(rows.query("label == 'BAPO, all near groups'")["cost"]) == {"responses", "tokens"}
    assert set(rows.query("label == 'BAPO'")["cost"]) == {"responses", "tokens", "seconds"}


def test_one_pair_is_no_answer():
    both = results_of("plain", "recipe")
    one = Results(both.study, [run for run in both.runs if run.seed == 1])
    replay_map.add_costs(one, None)
    assert replay_map.gains(one).empty and replay_map.confirmation({"study": one}).empty


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.001, 0.1, "ahead"), (-0.1, -0.001, "behind"), (-0.01, 0.01, "equal"), (-0.02, 0.005, "undecided"),
     (-0.005, 0.02, "undecided")],
)  # fmt: skip
def test_answers_of_the_design(low, high, expected):
    assert replay_map.answer(low, high) == expected


def test_unit_times_leave_out_the_first_steps():
    """Generation: 4 s for 16 responses; everything else: 3 s and 5 s in two steps."""
    steps = pd.DataFrame({
        "step": [1, 4, 5, 6], "rollouts/step": [8, 8, 8, 8],
        "timing/generation": [90.0, 90.0, 1.0, 3.0], "timing/step_total": [900.0, 900.0, 4.0, 8.0],
    })  # fmt: skip
    assert replay_map.units_of(steps) == {"response": 0.25, "update": 4.0}


def test_signal_of_the_responses():
    """8 responses at 1/2 and 8 at 1/4 are used, 8 at 1/8 are not, and 8 at 0 have none: 1/4, 3/16, 7/64 and 0."""
    groups = [
        {"step": 1, "uid": uid, "prompt": "p", "source": "fresh", "state": state, "mean": mean, "responses": 8}
        for uid, (state, mean) in enumerate(
            [("fresh", 0.5), ("reevaluated", 0.25), ("unimproved", 0.125), ("filtered", 0.0)]
        )
    ]
    arm = Arm("bapo", "group", "BAPO", {})
    run = StudyRun(arm, 1, Run("", [{"step": 1}], {"config": {}}, groups_frame(groups)))
    [row] = replay_map.signal(Results(Study("made", (arm,), (1,)), [run])).to_dict("records")
    assert row == {
        "label": "BAPO", "responses": 32,
        "generated": pytest.approx((1 / 4 + 3 / 16 + 7 / 64) / 4), "used": pytest.approx((1 / 4 + 3 / 16) / 4),
    }  # fmt: skip


def test_optimizer_steps_for_a_thousand_responses():
    """Full batches of 32 in optimizer steps of 16, twice: 4. Adapted batches of 32, 20 and 8, once: 2, 2 and 1."""
    flags = {
        "actor.model_name_or_path": "model", "data.prompt_dataset": "data", "reward.remote_url": "rule.py",
        "rollout.batch_size": 8, "rollout.n_samples_per_prompt": 4, "train.batch_size": 16,
    }  # fmt: skip
    plain = Arm("plain", "group", "GRPO", flags | {"adapt.method": "none", "train.max_epochs": 2})
    bapo = Arm("bapo", "group", "BAPO", flags)
    full = [{"step": step, "rollouts/step": 32} for step in (1, 2)]
    adapted = [{"step": step, "rollouts/step": 40, "responses/trained": n} for step, n in enumerate((32, 20, 8), 1)]
    runs = [
        StudyRun(arm, 1, Run("", steps, {"config": {}}, groups_frame([])))
        for arm, steps in ((plain, full), (bapo, adapted))
    ]
    rows = replay_map.optimizer_steps(Results(Study("made", (plain, bapo), (1,)), runs)).to_dict("records")
    assert rows == [
        {"label": "GRPO", "path": "group", "optimizer_steps": 1000 * 8 / 64},
        {"label": "BAPO", "path": "group", "optimizer_steps": 1000 * 5 / 120},
    ]


def test_gains_and_optimizer_steps_go_together_as_a_whole_and_not_among_alike_arms():
    steps = {"a": 10, "b": 12, "c": 15, "d": 18, "e": 31, "other": 15}
    gained = {"a": -5.0, "b": 1.0, "c": 0.0, "d": 1.0, "e": 9.0, "other": 99.0}
    settings = {label: "tuned" if label == "other" else "small batches" for label in steps}
    rows = [
        {"label": label, "path": "group", "setting": settings[label], "cost": cost, "gain": gain}
        for label, value in gained.items() for cost, gain in (("responses", value), ("tokens", 50.0))
    ]  # fmt: skip
    optimizer = pd.DataFrame([
        {"label": label, "path": path, "setting": settings[label], "optimizer_steps": count}
        for label, count in steps.items() for path in ("group", "critic", "group")
    ])  # fmt: skip
    table = replay_map.gain_by_steps(pd.DataFrame(rows), optimizer).set_index("arms")
    for arms, labels in (("all", "abcde"), ("12 to 18 steps", "bcd")):
        wanted = np.corrcoef([gained[label] for label in labels], [np.log(steps[label]) for label in labels])[0, 1]
        assert tuple(table.loc[arms]) == pytest.approx((len(labels), wanted))

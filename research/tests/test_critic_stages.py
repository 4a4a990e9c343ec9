"""The stages of critic_design.md, and its analysis: a setting by the worse of two runs, one rate, and a doubled p."""

import decision_stages as stages
import fair_trial
import numpy as np
import pytest
from decision import Records
from made_runs import flag, write_stage

TOPS = {"ppo": 0.5, "today": 0.52, "control": 0.53, "generated": 0.6, "grouped": 0.58, "group_relative": 0.55}


def write(name, root, top=lambda method, rate, seed: 0.5, explained=lambda method, seed: 0.0):
    def of_run(run):
        return [explained(stages.method_of(run.arm), run.seed)] * 4 if run.arm.path == "critic" else ()

    more = {"groups/replayed": 2, "value/explained_variance_generated": 0.4, "value/explained_variance_fresh": 0.1}
    return write_stage(name, root, top, explained=of_run, metrics=lambda run: lambda step: more)


def of_all(root):
    """The runs of all stages, if the first change of the setting is enough, and 2e-3 is the best rate."""
    write("critic_setting", root, explained=lambda method, seed: {"setting": (0.3, 0.1), "partial": (0.3, 0.25)}[
        method][seed - 501])  # fmt: skip
    write("critic_rates", root, top=lambda method, rate, seed: 0.6 if rate == 2e-3 else 0.5)
    spread = np.random.default_rng(0).normal(size=(len(TOPS), 12))
    return write("critic_arms", root, lambda method, rate, seed: (
        TOPS[method] + 0.003 * spread[list(TOPS).index(method), seed - 511]))  # fmt: skip


def test_the_arms_have_the_setting_that_both_runs_know_enough_in_and_the_rate_that_was_found(tmp_path):
    made = of_all(tmp_path)
    assert {(run.arm.method, run.seed) for run in made} == {
        (method, seed) for method in TOPS for seed in range(511, 523)
    }
    assert {float(flag(run, "critic.adam.lr")) for run in made} == {2e-3}
    assert {flag(run, "reward.remote_url") for run in made} == {"research/partial_sums.py"}
    assert {run.arm.method for run in made if flag(run, "adapt.filter") == "none"} == {"ppo"}
    assert {run.arm.method for run in made if any("filter_only" in word for word in run.words)} == {"ppo"}
    assert len(stages.planned(stages.stage_of("critic_setting"), tmp_path)) == 4


def test_the_better_of_two_arms_has_a_doubled_p(tmp_path, monkeypatch):
    of_all(tmp_path)
    monkeypatch.setattr(fair_trial, "permutation_p", lambda first, second: 0.004)
    table = fair_trial.primary(Records(tmp_path), "critic")
    better = {stages.definition("critic_groups").arms[3].label: "generated"}
    assert [better.get(label) for label in table["better"]] == ["generated", None, "generated"]
    assert list(table["p"]) == pytest.approx([0.004, 0.004, 0.008])
    assert list(table["p_holm"]) == pytest.approx([0.012, 0.012, 0.012])


def test_the_page_has_what_each_critic_explains(tmp_path):
    of_all(tmp_path)
    table = fair_trial.tables_of(Records(tmp_path), "critic")["What the critic explains (critic_setting)"]
    assert table["explained"].tolist() == pytest.approx([0.3, 0.3, 0.1, 0.25])
    table = fair_trial.tables_of(Records(tmp_path), "critic")["What the critic explains (critic_arms)"]
    labels = {arm.method: arm.label for arm in stages.definition("critic_groups").arms}
    for name, wanted in (("today", 0.0), ("generated", 0.4)):
        rows = table[table["label"] == labels[name]]
        assert rows["explained"].tolist() == pytest.approx([wanted] * 12)
        assert rows["of X1"].tolist() == pytest.approx([0.1] * 12)
    updates = {
        name: set(table[table["label"] == labels[name]]["updates"]) for name in ("today", "control", "generated")
    }
    # In each of four steps 64 responses, and with all groups 16 more; the control makes two epochs.
    assert updates == {"today": {4}, "control": {4 * 2}, "generated": {4 * 2}}


def test_without_a_setting_there_are_no_arms(tmp_path):
    write("critic_setting", tmp_path, explained=lambda method, seed: 0.19)
    assert stages.planned(stages.stage_of("critic_rates"), tmp_path) == []
    assert stages.planned(stages.stage_of("critic_arms"), tmp_path) == []
    assert set(fair_trial.primary(Records(tmp_path), "critic")["answer"]) == {"not tested"}

"""The stages of reuse_design.md: rates that searches of another trial have found, and one comparison."""

import decision_stages as stages
import fair_trial
import kept_records
import pytest
from decision import Records
from made_runs import flag, write_stage


def search(root):
    """Both searches of the fair trial. The arms that are compared with here have rates of their own."""
    best = {"wide": 5e-5, "four_epochs": 2e-5}
    for name in ("shape_rates", "price_rates"):
        write_stage(name, root, lambda method, rate, seed: 0.6 if rate == best.get(method, 1e-4) else 0.5)


def test_both_arms_have_the_rate_of_the_arm_that_was_searched(tmp_path):
    with pytest.raises(stages.NotYet):
        stages.planned(stages.stage_of("prefixes"), tmp_path)
    search(tmp_path)
    for name, rate, seeds in (("prefixes", 5e-5, range(611, 623)), ("gate", 2e-5, (901,))):
        runs = stages.planned(stages.stage_of(name), tmp_path)
        assert {float(flag(run, stages.RATE)) for run in runs} == {rate}
        methods = stages.stage_of(name).seconds
        assert {(run.arm.method, run.seed) for run in runs} == {(method, seed) for method in methods for seed in seeds}


def test_a_new_worktree_has_the_searches_of_the_other_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_records, "RESULTS", tmp_path / "kept")
    kept_records.folder_of("fair").mkdir(parents=True)
    search(tmp_path / "first")
    kept_records.keep_all(tmp_path / "first", "fair")
    kept_records.unpack(tmp_path / "second", "reuse")
    assert len(stages.planned(stages.stage_of("prefixes"), tmp_path / "second")) == 24


def test_part_1_has_one_comparison(tmp_path):
    search(tmp_path)
    write_stage(
        "prefixes", tmp_path, lambda method, rate, seed: 0.5 + 0.1 * (method == "prefixes") + 0.0001 * (seed % 7)
    )
    (row,) = fair_trial.primary(Records(tmp_path), "reuse").to_dict("records")
    # The area below a straight line from the start is half of its height.
    assert row["gain"] == pytest.approx(5.0) and row["p"] == row["p_holm"] and row["answer"] == "ahead"

"""The stages of fair_trial_design.md: rates by the mean of three runs, equal numbers of updates, the best replay."""

import decision_runs as runner
import decision_stages as stages
import mixed_sums
import numpy as np
import pytest
from decision import taken
from made_runs import MADE, flag, write_run, write_stage

RATES = {"filter_only": 1e-4, "wide": 5e-5, "matched": 1e-4}
BATCHES = {"filter_only": (130, 90, 75, 60), "wide": (256, 256, 200, 256)}  # responses trained on in each step


def write(name, root, top):
    def metrics(run):
        method = stages.method_of(run.arm)
        trained = BATCHES.get(method, (256,) * 4)
        more = 60 * (method == "filter_only" and float(flag(run, stages.RATE)) == 2e-5)  # its batches are larger
        return lambda step: {"responses/trained": trained[step - 1] + more}

    return write_stage(name, root, top, metrics=metrics)


def search_shape(root):
    return write("shape_rates", root, lambda method, rate, seed: 0.6 if rate == RATES[method] else 0.5)


def test_names_are_those_of_one_stage_each():
    names = [stage.name for stage in stages.every_stage()]
    assert len(names) == len(set(names)) and {stage.name for stage in stages.stages_of("fair")} < set(names)
    assert [stage.name for stage in stages.stages_of("decision")] == [stage.name for stage in stages.STAGES]


def test_a_rate_is_the_highest_mean_of_three_kept_runs(tmp_path):
    """The lower one of the seeds does not matter, and no rate is added at an end of the grid."""

    def top(method, rate, seed):
        return {2e-5: 0.5, 5e-5: 0.5, 1e-4: (0.9, 0.3, 0.36)[seed - 417]}[rate]

    made = write("shape_rates", tmp_path, top)
    assert {(run.arm.method, run.seed) for run in made} >= {("wide_0.0001", seed) for seed in (417, 418, 419)}
    assert len(made) == 3 * 3 * 3
    assert set(stages.chosen_rates(stages.stage_of("shape_rates"), tmp_path).values()) == {1e-4}


def test_the_page_says_if_a_rate_is_at_an_end_of_its_grid():
    stage, by_rate = stages.stage_of("shape_rates"), {2e-5: 0.1, 5e-5: 0.3, 1e-4: 0.2}
    assert [taken(stage, by_rate, rate) for rate in by_rate] == ["", "taken", ""]
    assert taken(stage, by_rate | {1e-4: 0.4}, 1e-4) == "taken, at an end of the grid"


def test_the_arm_with_as_many_updates(tmp_path):
    """By brute force. Its runs come after the others of the search, and have the size of their rate."""
    made = search_shape(tmp_path)
    assert {stages.method_of(run.arm) for run in made[-9:]} == {"matched"}
    wanted = sum(int(np.ceil(responses / 64)) for responses in BATCHES["wide"])
    for rate, more in ((2e-5, 60), (5e-5, 0), (1e-4, 0)):
        updates = {
            size: sum(int(np.ceil((responses + more) / size)) for responses in BATCHES["filter_only"])
            for size in stages.SIZES
        }
        best = min(abs(count - wanted) for count in updates.values())
        [size] = {int(flag(run, "train.batch_size")) for run in made[-9:] if float(flag(run, stages.RATE)) == rate}
        assert abs(updates[size] - wanted) == best
        assert (size > 32) == bool(more)
    runs = stages.planned(stages.stage_of("shape"), tmp_path)
    chosen = {run.arm.method: (float(flag(run, stages.RATE)), flag(run, "train.batch_size")) for run in runs}
    assert {method: rate for method, (rate, _) in chosen.items()} == RATES
    assert chosen["matched"][1] == str(size) and chosen["wide"][1] is None


def test_runs_that_come_later_in_a_search_are_left_too(tmp_path):
    stage = stages.stage_of("shape_rates")
    assert stages.seconds_left(stage, tmp_path) == (27, pytest.approx(9 * sum(stage.seconds.values()) / 2))
    search_shape(tmp_path)
    assert stages.seconds_left(stage, tmp_path)[0] == 0


def test_the_best_replay_is_judged_at_the_price_of_its_comparisons(tmp_path):
    """B = 16 is higher at its own best rate. With an equal number of responses, B = 8 would be."""
    best = {"four_epochs": 1e-4, "two_epochs": 2e-5, "filtered": 2e-5, "replay_8": 2e-5, "replay_16": 1e-4}

    def top(method, rate, seed):
        return (0.7 if method == "replay_16" else 0.6) if rate == best[method] else 0.4

    with pytest.raises(stages.NotYet):
        stages.planned(stages.stage_of("price"), tmp_path)
    assert stages.seconds_left(stages.stage_of("price"), tmp_path)[0] == 4 * 28
    write("price_rates", tmp_path, top)
    runs = stages.planned(stages.stage_of("price"), tmp_path)
    assert {(run.arm.method, float(flag(run, stages.RATE))) for run in runs} == {
        ("four_epochs", 1e-4), ("two_epochs", 2e-5), ("filtered", 2e-5), ("replay_16", 1e-4)}  # fmt: skip
    assert len(runs) == 4 * 28 == stages.seconds_left(stages.stage_of("price"), tmp_path)[0]


def test_runs_with_one_seed_may_have_two_kinds_of_cpu_if_nothing_is_paired(tmp_path):
    stage = stages.stage_of("recipe")
    runs = stages.planned(stage, tmp_path)
    for run, cpu in zip(runs[:2], ("EPYC", "Xeon"), strict=True):
        write_run(run, 0.5, cpu=cpu)
    runner.require_unmixed(stage, runs, MADE)
    assert len(runner.mixtures(runner.origins_of(runs))) == 1


def test_the_design_has_the_hours_of_the_plan(tmp_path):
    table = runner.left(tmp_path, "fair")
    assert table in (runner.ROOT / "research" / "fair_trial_design.md").read_text()
    hours = {cells[1].strip(): float(cells[4]) for cells in (line.split("|") for line in table.splitlines()[2:])}
    assert hours["all"] <= 30


def test_the_first_prompts_of_each_kind_are_taken():
    prompts = [f"p{number}" for number in range(400)]
    counts = {prompt: number % 3 for number, prompt in enumerate(prompts)}
    chosen = mixed_sums.mixed(prompts, counts)
    none = [prompt for prompt in prompts if counts[prompt] == 0]
    assert chosen & set(none) == set(none[:128]) and len(chosen) == 256
    assert max(int(prompt[1:]) for prompt in chosen - set(none)) == 191  # two of three have a right response
    with pytest.raises(ValueError, match="100 prompts at 0"):
        mixed_sums.mixed(prompts[:300], counts)
    with pytest.raises(ValueError, match="lacks 1 of the prompts"):
        mixed_sums.mixed([*prompts, "new"], counts)

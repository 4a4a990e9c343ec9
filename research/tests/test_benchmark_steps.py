"""The table of research/benchmarks/steps.py: ratios within a round, to the plain run of the same advantages."""

from pathlib import Path

import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.cli import arguments

FILE = Path(__file__).parents[1] / "benchmarks" / "steps.py"


@pytest.fixture(scope="module")
def steps():
    return user_file.load("benchmark", FILE)


def run(seconds, responses=256.0, trained=1000.0):
    points = [[8 * seconds, 8 * responses, 8 * trained, 0.2], [16 * seconds, 16 * responses, 16 * trained, 0.28]]
    return {"seconds": seconds, "responses": responses, "trained": trained, "points": points}


def test_ratios_are_within_a_round(steps):
    result = {
        "GRPO, plain OpenRLHF": [run(1.0), run(2.0), run(4.0)],
        "BAPO-GRPO": [run(0.9), run(2.2), run(2.0, responses=320.0, trained=500.0)],
        "PPO, plain OpenRLHF": [run(10.0)] * 3,
        "BA-PPO": [run(5.0)] * 3,
    }
    kinds = {kind.name: kind for kind in steps.KINDS}
    assert steps.ratios(result, kinds["BAPO-GRPO"], "seconds") == pytest.approx([0.9, 1.1, 0.5])
    assert steps.ratios(result, kinds["BA-PPO"], "seconds") == [0.5, 0.5, 0.5]
    header = {"runs": result, "steps": 24, "rounds": 3, "machine": "a machine", "commit": "abc", "command": "python"}
    header |= {"evaluate_every": 8, "target": 0.26}
    page = steps.markdown(header)
    assert "| BAPO-GRPO | 2.00 (0.90 to 2.20) | 0.90 (0.50 to 1.10) | 160 (116 to 284) | 256 | 1,000 |" in page
    assert "| GRPO, plain OpenRLHF | 2.00 (1.00 to 4.00) | 1 |" in page
    assert "DAPO" not in page and "TRL" not in page
    assert "| BA-PPO | 3 of 3 | 70.0 (70.0 to 70.0) | 3,584 (3,584 to 3,584) | 14,000 (14,000 to 14,000) |" in page
    assert "| BA-PPO | 0 of 3 | – | – | – | 28.0 " in steps.markdown(header | {"target": 0.3})


@pytest.mark.parametrize(
    ("accuracies", "share"),
    [
        ([0.1, 0.2, 0.4], 1.25),  # of the way, in evaluations after the first
        ([0.1, 0.3, 0.2, 0.4], 0.75),  # a fall afterwards changes nothing
        ([0.1, 0.1, 0.25], 2.0),
        ([0.3, 0.1], 0.0),  # there at the first evaluation
        ([0.1, 0.2], None),
        ([], None),
    ],
)
def test_way_to_an_accuracy(steps, accuracies, share):
    points = [steps.Point(10.0 + 10 * k, 100.0 * k, 7.0 * k, value) for k, value in enumerate(accuracies)]
    result = steps.reached(points, 0.25)
    if share is None:
        assert result is None
    else:
        first = points[0].accuracy if share == 0 else 0.25
        assert result == pytest.approx((10 + 10 * share, 100 * share, 7 * share, first))


def test_way_is_summed_up_to_each_evaluation(steps, tmp_path, monkeypatch):
    rows = [{"timing/step_total": 2.0**k, "rollouts/step": 10, "tokens/trained": k} for k in range(6)]
    evaluated = [{"step": step, "eval_cd34_pass1": step / 10, "eval_other_pass1": 1.0} for step in (2, 4, 6)]
    asked = {}
    monkeypatch.setattr(steps, "run", lambda kind, folder, flags, more: asked.update(flags) or rows)
    monkeypatch.setattr(steps, "read_evaluations", lambda folder: evaluated)
    result = steps.train(steps.KINDS[0], tmp_path, 5, 2, seed=3)
    assert result["seconds"] == 16.0  # the fifth step: four come before, and the sixth was not asked for
    assert result["points"] == [(3.0, 20, 1, 0.2), (15.0, 40, 6, 0.4)]
    assert asked["eval.steps"] == 2 and asked["train.seed"] == 3
    asked.clear()
    steps.train(steps.KINDS[1], tmp_path, 5, 2, seed=3)
    assert not any(name.startswith("eval.") for name in asked)


def test_flags_are_flags_and_each_base_is_plain(steps):
    kinds = {kind.name: kind for kind in steps.KINDS}
    for kind in steps.KINDS:
        flags = steps.SETTING | kind.flags
        words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
        args = arguments.parse(["--config", "configs/countdown/train.yaml", "--algorithm", kind.algorithm, *words])
        base = arguments.parse(["--config", "configs/countdown/train.yaml", "--algorithm", kinds[kind.base].algorithm])
        assert not base.adapt.enabled
        assert base.algo.advantage.estimator == args.algo.advantage.estimator
        assert args.algo.dynamic_filtering_enable is kind.name.startswith("DAPO")

"""The example in TRL: what it imports here, and what it trains on in an environment that has TRL."""

import ast
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.adapt.vocabulary import STATES
from bapo_openrlhf.tasks import countdown

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "trl" / "replay_grpo.py"
PROBE = Path(__file__).with_name("trl_probe.py")
PYTHON = os.environ.get("TRL_PYTHON")
STEPS = 4

with_trl = pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON does not name an interpreter that has TRL")


def test_it_is_short_and_needs_only_the_pure_layer():
    """Its imports of this project bring neither torch nor anything of OpenRLHF's stack with them."""
    source = EXAMPLE.read_text()
    assert source.count("\n") <= 200
    names = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = [name for name in names if name.split(".")[0] == "bapo_openrlhf"]
    assert len(modules) >= 5
    hosts = {"torch", "openrlhf", "ray", "vllm", "deepspeed", "transformers"}
    code = f"import sys, {', '.join(modules)}; assert not {hosts} & set(sys.modules), {hosts} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    model, _ = user_file.load("base model", EXAMPLES / "quickstart" / "base_model.py").build(folder / "model")
    problems = countdown.generate("small", "train", 256, 0)
    rows = [{"input": countdown.short_prompt(problem), "label": problem.label} for problem in problems]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    words = [Path(PYTHON).absolute(), PROBE, model, "data.jsonl", str(STEPS)]
    subprocess.run(words, check=True, cwd=folder, env=environment)
    return json.loads((folder / "steps.json").read_text())


@with_trl
@pytest.mark.slow
class TestTraining:
    def test_replayed_rows_keep_the_log_probs_of_the_policy_that_generated_them(self, run):
        replayed = []
        for step in run["steps"]:
            ratios, logged = step["ratios"]["replayed"], step["logged"]
            assert len(ratios) == 8 * logged["groups/replayed"]
            if ratios:
                assert logged["importance/replayed_mean"] == pytest.approx(statistics.mean(ratios), rel=1e-3)
            replayed += ratios
        assert len(replayed) >= 80 and statistics.median(abs(ratio - 1) for ratio in replayed) > 0.01

    def test_fresh_rows_have_the_ratio_1(self, run):
        means = [step["logged"]["importance/fresh_mean"] for step in run["steps"] if step["ratios"]["fresh"]]
        assert len(means) >= STEPS - 1 and means == pytest.approx([1.0] * len(means), abs=1e-4)

    def test_the_loss_is_clipped_on_these_ratios_with_the_advantages_of_each_group(self, run):
        """Recomputed from weights and rewards alone, so no filler counts and no group has another one's advantages."""
        for step in run["steps"]:
            assert step["loss_of_trl"] == pytest.approx(step["loss"], rel=1e-3, abs=1e-5)

    def test_every_group_is_in_one_counted_state(self, run):
        logged = [step["logged"] for step in run["steps"]]
        for row in logged:
            assert row["groups/generated"] == 16 == row["groups/fresh"] + row["groups/filtered"]
            assert row["groups/fresh"] + row["groups/replayed"] <= 16
        assert run["counts"]["generated"] == 16 * STEPS == sum(run["counts"][name] for name in STATES)

    def test_a_rollout_without_signal_changes_nothing(self, run):
        logged = run["without_signal"]
        assert (logged["groups/filtered"], logged["groups/fresh"], logged["groups/replayed"]) == (16, 0, 0)
        assert (logged["loss"], logged["grad_norm"]) == (0, 0)

    def test_what_it_does_not_support_is_refused(self, run):
        assert run["refused"] == "beta is 0.1; it must be 0.0"

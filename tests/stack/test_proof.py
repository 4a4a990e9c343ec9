"""A run proves in its first steps that engine and actor are the same policy, and that the first ratio is 1."""

import json
import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

CLI = ("-m", "bapo_openrlhf.cli.train_ppo_ray")
OTHER = (str(Path(__file__).parent / "probe.py"), "other_weights")
GRPO = {"algorithm": "bapo_grpo", "algo__kl__init_coef": 0.0, "adapt__rollout_delay": 1, "actor__adam__lr": 1e-2,
        "data__max_samples": 24, "ckpt__save_steps": 1}  # fmt: skip


@pytest.mark.parametrize(("other", "cause"), [("read", "a second set of them"), ("sent", "did not reach the engines")])
def test_a_run_whose_engines_hold_other_weights_ends(train, other, cause):
    """Before its first update; or as soon as there are enough tokens after updates that did not reach the engines."""
    flags = {**GRPO, "data__max_samples": 48, "run__name": f"other_{other}"}
    result = train(f"other_{other}", *OTHER, environment={"OTHER": other}, **flags)
    last = result.output.strip().splitlines()[-1]
    assert result.status == 1 and cause in last and "adapt.max_gap is 0.02" in last, result.output[-6000:]
    steps = len(result.metrics if (result.folder / "metrics.jsonl").exists() else [])
    assert last.startswith(f"error: step {steps + 1}, making experience: ")
    assert steps == 0 if other == "read" else 1 <= steps < 6


def test_a_model_with_dropout_starts_at_the_ratio_1(train, workspace):
    """Both passes have micro-batches of one shape, so that a CPU computes the same bits. A resume looks, too."""
    model = workspace / "model_with_dropout"
    shutil.copytree(workspace / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.3}))
    flags = {**GRPO, "actor__model_name_or_path": model, "run__name": "dropout", "rollout__micro_batch_size": 4}
    flags |= {"adapt__replay_steps": 0, "ds__lora__rank": 4}
    assert train("dropout", *CLI, **flags).status == 0
    result = train("dropout", *CLI, switches=("ckpt.load_enable",), **flags, train__num_episodes=2)
    assert result.status == 0, result.output[-6000:]
    assert all(row["gap/kl"] < 0.003 for row in result.metrics)
    assert [result.metrics[step]["ppo_clip_ratio"] for step in (0, 3)] == [0, 0]

"""Another model's responses on the real stack: in the groups of LUFFY, and in ReLIFT's fine-tuning."""

import json
import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

CLI = ("-m", "bapo_openrlhf.cli.train_ppo_ray")


@pytest.fixture
def traces(workspace):
    """The same short response for every prompt of the data."""
    rows = [json.loads(line) for line in (workspace / "data.jsonl").read_text().splitlines()]
    lines = [json.dumps({"prompt": row["input"], "response": "1+1"}) + "\n" for row in rows]
    (workspace / "traces.jsonl").write_text("".join(lines))
    return "traces=traces.jsonl"  # relative: the run makes it absolute


def test_luffy(train, traces, tmp_path):
    flags = {"algorithm": "bapo_grpo", "adapt__method": "luffy", "adapt__options": traces, "adapt__rollout_delay": 1}
    scripted = Path(__file__).parent / "scripted_reward.py"
    counts = {"PROBE_FOLDER": str(tmp_path)}
    result = train("luffy", *CLI, environment=counts, run__name="luffy", reward__remote_url=scripted, **flags)
    assert result.status == 0, result.output[-6000:]
    trained = [row for row in result.metrics if row["groups/fresh"]]
    assert len(trained) >= 4 and all(row["traces/mixed"] == 8 and row["traces/prompts"] == 48 for row in result.metrics)
    for row in trained:
        assert row["traces/trained_share"] == pytest.approx(1 / 4)
        assert math.isfinite(row["policy_loss"]) and 0 < row["actor_grad_norm"] < math.inf
        assert row["tv/fresh"] < 0.5  # a random model's traces would be far from it


def test_relift(train, traces, tmp_path):
    """No response is right, so that nothing else is trained on: the loss of the same demonstrations falls."""
    (tmp_path / "wrong.py").write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n    return {'rewards': [0.0] * len(queries)}\n"
    )
    result = train(
        "relift",
        *CLI,
        algorithm="bapo_grpo",
        run__name="relift",
        reward__remote_url=tmp_path / "wrong.py",
        adapt__method="relift",
        adapt__options=[traces, "finetune_batch=7"],  # no multiple of the micro-batch
        adapt__rollout_delay=1,
    )
    assert result.status == 0, result.output[-6000:]
    rows = result.metrics
    assert [row["finetune/demonstrations"] for row in rows] == [7] * 6 and all(row["skipped_update"] for row in rows)
    losses = [row["finetune/loss"] for row in rows]
    assert losses[0] > 3 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.3

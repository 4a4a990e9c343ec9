"""Another model's responses on the real stack: in the groups of LUFFY."""

import json
import math
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

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

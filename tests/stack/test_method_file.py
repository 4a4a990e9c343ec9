"""A method in a file of its own on the real stack."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_method" / "fifo_replay.py"
CLI = ("-m", "bapo_openrlhf.cli.train_ppo_ray")


def test_the_documented_example_trains(train, tmp_path):
    result = train(
        "fifo",
        *CLI,
        environment={"PROBE_FOLDER": str(tmp_path)},
        algorithm="bapo_grpo",
        run__name="fifo",
        adapt__method=f"{EXAMPLE}:FIFOReplay",
        adapt__options="memory=6",
        reward__remote_url=Path(__file__).parent / "scripted_reward.py",
        adapt__rollout_delay=2,
    )
    assert result.status == 0, result.output[-6000:]
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4, 5, 6]
    replayed = [row["groups/replayed"] for row in result.metrics]
    assert replayed[0] == 0 and sum(replayed) > 0
    assert max(row["buffer/replay"] for row in result.metrics) == 6
    config = json.loads((result.folder / "run.json").read_text())["config"]
    assert config["adapt.method"].endswith("fifo_replay.py:FIFOReplay") and config["adapt.options"] == ["memory=6"]

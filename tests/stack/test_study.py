"""A study on the real stack: two methods, one seed, three steps, two runs at a time in one Ray.

One method is in a file of its own. The other one has a critic, and groups of several sizes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_methods import OPTIONS, accounts_for_every_response

from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import read_evaluations, read_metrics, read_run, read_summary

pytestmark = pytest.mark.stack


COMMAND = [sys.executable, "-m", "bapo_openrlhf.cli", "study", "--config", "pair.yaml", "--smoke"]
RUNS = {"fifo-group-s7": "bapo_grpo", "ar3po-critic-s7": "ba_ppo"}
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "custom_method" / "fifo_replay.py"
MEMORY = 6  # groups


@pytest.fixture(scope="module")
def study(workspace, small_flags):
    flags = {
        "actor.model_name_or_path": "model", "critic.model_name_or_path": "model", "data.max_samples": 24,
        "data.prompt_dataset": "data.jsonl", "eval.dataset": "data.jsonl", "ckpt.best_metric_key": "none",
    }  # fmt: skip
    fifo = {"adapt.method": f"{EXAMPLE}:FIFOReplay", "adapt.options": [f"memory={MEMORY}"]}
    ar3po = {  # a group may have one response
        "adapt.method": "ar3po", "adapt.options": [OPTIONS["ar3po"]], "adapt.filter": "none",
        "adapt.rollout_delay": 1, "reward.remote_url": str(HERE / "scripted_reward.py"),
    }  # fmt: skip
    short = {"eval.steps": 2, "eval.n_samples_per_prompt": 2}
    content = {
        "name": "pair",
        "flags": small_flags | flags,
        "seeds": [7, 8],
        "parallel": 2,
        "methods": {
            "fifo": {"arms": {"group": "FIFO"}, "flags": fifo},
            "bapo": {"arms": {"group": "BAPO-GRPO"}},
            "ar3po": {"arms": {"critic": "AR3PO"}, "flags": ar3po},
        },
        "smoke": {"methods": ["fifo", "ar3po"], "flags": short},
    }
    (workspace / "pair.yaml").write_text(yaml.safe_dump(content))
    counts = workspace / "study_counts"  # for what scripted_reward.py counts
    counts.mkdir()
    environment = os.environ | {"PROBE_FOLDER": str(counts)}
    done = subprocess.run(COMMAND, cwd=workspace, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = workspace / "runs" / "studies" / "pair_smoke"
    assert "2 of 2 runs are there" in (folder / "report.html").read_text()
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_each_run_leaves_a_whole_record(study, name):
    folder = study / "runs" / name
    metadata = read_run(folder)
    assert (metadata["name"], metadata["algorithm"], metadata["seed"]) == (name, RUNS[name], 7)
    assert read_summary(folder)["steps"] == 3
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    names = {name for row in rows for name in row} - {"step", "length"}  # "length" is what reward.py reports
    assert names <= metrics.names(RUNS[name], optional=True)
    assert ("critic_loss" in names) is (RUNS[name] == "ba_ppo")
    (evaluation,) = read_evaluations(folder)
    (accuracy,) = (value for name, value in evaluation.items() if name.endswith("_pass1"))
    assert evaluation["step"] == 2 and 0 <= accuracy <= 1


def test_the_documented_method_from_a_file_trains(study):
    folder = study / "runs" / "fifo-group-s7"
    rows = read_metrics(folder)
    replayed = [row["groups/replayed"] for row in rows]
    assert replayed[0] == 0 < sum(replayed) and max(row["buffer/replay"] for row in rows) == MEMORY
    config = read_run(folder)["config"]
    assert config["adapt.method"].endswith("fifo_replay.py:FIFOReplay")
    assert config["adapt.options"] == [f"memory={MEMORY}"]


def test_groups_of_several_sizes_train_actor_and_critic(study):
    accounts_for_every_response("ar3po", "ba_ppo", study / "runs" / "ar3po-critic-s7")


def test_they_went_on_at_the_same_time(study):
    folders = [study / "runs" / name for name in RUNS]
    assert max(read_run(one)["started"] for one in folders) < min(read_summary(one)["finished"] for one in folders)

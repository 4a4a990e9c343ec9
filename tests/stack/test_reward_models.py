"""Rewards of a small reward model behind OpenRLHF's server. Scores are recomputed by transformers."""

import socket
import subprocess
import time

import numpy as np
import pytest
import torch
from test_faults import CLI, SWITCHES
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from bapo_openrlhf.cpu.prefork.serving import python
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state

pytestmark = [pytest.mark.stack, pytest.mark.slow]

# v = 2 and m = 3. Thresholds are wide, so that half of all groups are hard or replayed.
RUN = {
    "adapt__c1": "1/2",
    "adapt__c2": "1/4",
    "adapt__c3": "1",
    "adapt__batch_size": 16,
    "adapt__rollout_delay": 2,
    "adapt__reevaluate_every": 3,
    "ckpt__save_steps": 3,
}


@pytest.fixture(scope="module")
def judge(workspace):
    """The folder of a reward model with random weights, whose scores are spread over some units."""
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(workspace / "model", num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.mul_(8)
    model.to(torch.bfloat16).save_pretrained(workspace / "judge")
    AutoTokenizer.from_pretrained(workspace / "model").save_pretrained(workspace / "judge")
    return workspace / "judge"


def scores_of(judge, rows):
    """The score of each row of tokens by itself, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.bfloat16)
    with torch.no_grad():
        return [float(model(torch.tensor([row.tolist()])).logits) for row in rows]


def stored_groups(workspace, name):
    """The groups in the replay buffer of the checkpoint of step 3."""
    state = load_state(CheckpointStore(workspace / name / "checkpoints", critic=False).folder("global_step3"))
    return state["method"]["replay"]["groups"]


def assert_scored(judge, groups):
    """Each reward is the score of transformers. Padding moves a bfloat16 by some of its steps, 2^-8 near 1."""
    responses = [response for group in groups for response in group["responses"]]
    wanted = scores_of(judge, [response["token_ids"] for response in responses])
    assert len(wanted) >= 8 and np.std(wanted) > 0.2
    assert [response["reward"] for response in responses] == pytest.approx(wanted, abs=0.05)


# ── Behind a server ──


@pytest.fixture
def server(judge):
    """The address of OpenRLHF's server with the reward model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--reward.model_name_or_path", str(judge), "--data.max_len", "32", "--ds.attn_implementation", "eager"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    with (judge / "server.log").open("w") as log:
        process = subprocess.Popen([python(), "-m", "bapo_openrlhf.cli.serve_rm", *words], stdout=log, stderr=log)
    try:
        for _ in range(240):
            assert process.poll() is None, (judge / "server.log").read_text()
            with socket.socket() as asks:
                if asks.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/get_reward"
    finally:
        process.kill()
        process.wait()


def test_the_server_scores_what_the_run_stores(train, workspace, judge, server):
    values = RUN | {"reward__remote_url": server, "adapt__reward_range": [-3, 3], "data__max_samples": 24}
    result = train("served", *CLI, algorithm="bapo_grpo", run__name="served", switches=SWITCHES, **values)
    assert result.status == 0, result.output[-6000:]
    assert [row["groups/failed"] for row in result.metrics] == [0] * 3
    assert_scored(judge, stored_groups(workspace, "served"))
    assert {"score", "dummy_scores"} <= result.metrics[0].keys()

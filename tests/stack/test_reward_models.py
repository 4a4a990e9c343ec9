"""Rewards of a small reward model, behind OpenRLHF's server and in the run. Scores are recomputed by transformers."""

import socket
import subprocess
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_resume import killed_and_the_same_again
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from bapo_openrlhf.cpu.prefork.serving import python
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.run_record import read_evaluations, read_groups
from bapo_openrlhf.record.state_file import load_state

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SAVED = 3  # steps before the checkpoint
LONGEST = 32  # tokens that the server reads of a text
# v = 2 and m = 3. Thresholds are wide, so that half of all groups are hard or replayed.
RUN = {
    "adapt__c1": "1/2", "adapt__c2": "1/4", "adapt__c3": "1", "adapt__batch_size": 16, "adapt__rollout_delay": 2,
    "adapt__reevaluate_every": 3, "ckpt__save_steps": SAVED,
}  # fmt: skip


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
    """The score of each row of tokens by itself, at its last token, also if the model has written a padding there."""
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.bfloat16)
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(torch.tensor([row])).logits) for row in rows]


def state_of(workspace, name):
    """The state of the layer in the checkpoint of step SAVED."""
    return load_state(CheckpointStore(workspace / name / "checkpoints", critic=False).folder(f"global_step{SAVED}"))


def assert_scored(judge, groups, read=lambda tokens: tokens):
    """Each reward is the score of transformers. Padding moves a bfloat16 by some of its steps, 2^-8 near 1.

    `read` makes the reward model's tokens of the policy's.
    """
    responses = [response for group in groups for response in group["responses"]]
    wanted = scores_of(judge, [read(response["token_ids"].tolist()) for response in responses])
    assert len(wanted) >= 8 and np.std(wanted) > 0.2
    assert [response["reward"] for response in responses] == pytest.approx(wanted, abs=0.05)


@pytest.fixture
def server(judge):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"reward.model_name_or_path": judge, "data.max_len": LONGEST, "ds.attn_implementation": "eager"}
    words = [f"--{name}={value}" for name, value in (flags | {"host": "127.0.0.1", "port": port}).items()]
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
    values = RUN | {"reward__remote_url": server, "adapt__reward_range": "measured", "data__max_samples": 24}
    result = train("served", algorithm="bapo_grpo", train__full_determinism_enable=True, **values)
    assert [row["groups/failed"] for row in result.metrics] == [0] * 3
    tokenizer = AutoTokenizer.from_pretrained(judge)

    def read(tokens):
        """The server gets a text, of which it reads as many tokens as its flag says."""
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        return tokenizer(text, add_special_tokens=False, truncation=True, max_length=LONGEST)["input_ids"]

    assert_scored(judge, state_of(workspace, "served")["method"]["replay"]["groups"], read)
    assert {"score", "dummy_scores"} <= result.metrics[0].keys()


def kill_and_resume(train, name, victim, judge, **flags):
    """A run with the reward model that is killed and resumed. Its numbers are those of a run that is never stopped."""
    values = RUN | {"reward__remote_url": None, "reward__num_gpus_per_node": 1} | flags
    run = killed_and_the_same_again(train, name, victim, values | {"reward__model_name_or_path": judge})
    again = run.before[run.saved :]
    assert all(sum(row[f"groups/{what}"] for row in again) for what in ("fresh", "reevaluation_attempts", "replayed"))
    assert len({(row["reward/range_low"], row["reward/range_high"]) for row in run.rows}) == 1
    return run


def assert_stored(workspace, run, judge):
    """The stored rewards are the scores of transformers, and the record has their means, mapped from the range."""
    state = state_of(workspace, run.folder.name)
    groups = state["method"]["replay"]["groups"]
    assert_scored(judge, groups)
    low, high = (run.rows[0][f"reward/range_{end}"] for end in ("low", "high"))
    assert [float(Fraction(end)) for end in state["reward_range"]] == pytest.approx([low, high])
    means = {row["uid"]: row["mean"] for row in read_groups(run.folder)}
    for group in groups:
        assert group["reward_range"] == state["reward_range"]
        mean = np.mean([response["reward"] for response in group["responses"]])
        assert means[group["uid"]] == pytest.approx((mean - low) / (high - low), abs=1e-6)


def test_bapo_grpo_with_two_ranks_and_an_evaluation(train, workspace, judge):
    evaluation = {"eval__dataset": workspace / "data.jsonl", "eval__steps": SAVED, "eval__n_samples_per_prompt": 1}
    flags = {"algorithm": "bapo_grpo", "algo__kl__init_coef": 0.0, "reward__num_gpus_per_node": 2} | evaluation
    run = kill_and_resume(train, "judged_grpo", "actor", judge, **flags)
    assert_stored(workspace, run, judge)
    rows = read_evaluations(run.folder)
    assert [row["step"] for row in rows] == [SAVED, 2 * SAVED]
    low, high = (run.rows[0][f"reward/range_{end}"] for end in ("low", "high"))
    assert all(low < row["eval_default_pass1"] < high for row in rows)


def test_ba_ppo_whose_critic_begins_as_the_reward_model_beside_it(train, workspace, judge):
    """With ZeRO-3. Rewards are clipped for the advantages, and neither in the record nor for the thresholds."""
    flags = {"algorithm": "ba_ppo", "critic__model_name_or_path": None, "train__colocate_critic_reward": "true"}
    flags |= {"ds__zero_stage": 3, "reward__clip_range": [-0.5, 0.5], "algo__kl__init_coef": 0.0}
    run = kill_and_resume(train, "judged_ppo", "critic", judge, **flags)
    assert_stored(workspace, run, judge)
    assert max(abs(row["return"]) for row in run.rows) <= 0.5 < max(abs(row["reward/range_high"]) for row in run.rows)

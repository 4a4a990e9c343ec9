"""Worked solutions on the real stack: each run is killed with kill -9 and resumed. transformers recomputes losses."""

import json

import pytest
import torch
from test_faults import same_steps
from test_resume import killed_and_resumed
from test_training import EXTRA_LOGS
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.vocabulary import FAILED, STATES
from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import read_groups

pytestmark = [pytest.mark.stack, pytest.mark.slow]
SAVED = 3  # steps before the checkpoint; the run is killed in its sixth and last step
RUN = {
    "algorithm": "bapo_grpo",
    "algo__kl__init_coef": 0.0,
    "adapt__rollout_delay": 1,
    "adapt__reevaluate_every": 1,
    "adapt__max_reevaluated_prompts": 48,  # all of the hard buffer
    "train__micro_batch_size": 16,  # one micro-batch, so that a logged loss is a mean over tokens
    "data__solution_key": "worked",
    "ckpt__save_steps": SAVED,
}
KNOWN = metrics.names("bapo_grpo", optional=True) | {"step", *EXTRA_LOGS}
# Prompt, label and worked solution. Of MIXED, a sixth has none. Of HARD, no response is right.
MIXED = tuple(
    (f"{i}+{i % 7}=", str((8, 4, 4, 2, 2, 0)[i % 6]), None if i % 6 == 1 else str(i + i % 7)) for i in range(48)
)
HARD = tuple((f"{i}+{i % 7}=", "0", str(i + i % 7)) for i in range(48))


def trained(train, workspace, method, rows, **flags):
    """The rows and the groups of a run on this data. Its resumed part repeats the steps after the checkpoint."""
    path = workspace / f"{method}.jsonl"
    path.write_text(
        "".join(json.dumps(dict(zip(("input", "label", "worked"), row, strict=True))) + "\n" for row in rows)
    )
    values = RUN | {"adapt__method": method, "data__prompt_dataset": path} | flags
    run = killed_and_resumed(train, method, "actor", values)
    same_steps(run.rows[: len(run.before)], run.before, first=1)
    assert {name for row in run.rows for name in row} <= KNOWN
    groups = read_groups(run.folder)
    for row in run.rows:
        states = [group["state"] for group in groups if group["step"] == row["step"]]
        assert row["groups/generated"] == len(states) == sum(row[f"groups/{state}"] for state in (*STATES, FAILED))
        assert row["groups/demonstration"] == states.count("demonstration")
    return run.rows, groups


def solved_by(groups, step):
    """The rows of HARD whose worked solutions stand for groups of a step, in the order of the groups."""
    by_id = {Prompt(prompt, label).id: (prompt, worked) for prompt, label, worked in HARD}
    return [by_id[group["prompt"]] for group in groups if group["step"] == step and group["state"] == "demonstration"]


def log_probs(workspace, solved):
    """log p of each token of worked solutions under the weights that a run begins with. The last is the end token."""
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    result = []
    for texts in solved:
        asked, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        answer = [*answer, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*asked, *answer]])).logits[0, len(asked) - 1 : -1]
        result.append(logits.log_softmax(-1)[range(len(answer)), answer])
    return torch.cat(result)


def test_luffy_trains_on_mixed_groups(train, workspace):
    rows, groups = trained(train, workspace, "luffy", MIXED)
    known = {Prompt(prompt, label).id for prompt, label, worked in MIXED if worked}
    assert {group["responses"] for group in groups} == {3}
    for row in rows:
        fresh = [group["prompt"] for group in groups if group["step"] == row["step"] and group["state"] == "fresh"]
        assert row["responses/trained"] == 3 * len(fresh)
        assert row["demonstrations/trained"] == sum(prompt in known for prompt in fresh)
    assert sum(row["demonstrations/trained"] for row in rows) > 10


def test_relift_fine_tunes_on_what_waits(train, workspace):
    """Nine prompts together. Six wait when the checkpoint is written; without them the next step has eight."""
    rows, groups = trained(train, workspace, "relift", HARD, adapt__options="finetune_batch=9")
    assert [row["demonstrations/trained"] for row in rows] == [0, 9, 9, 9, 9, 9]
    assert [row["demonstrations/waiting"] for row in rows] == [8, 7, 6, 5, 4, 3]
    of_tokens = log_probs(workspace, [*solved_by(groups, 1), *solved_by(groups, 2)[:1]])
    assert rows[1]["demonstrations/tokens"] == len(of_tokens)
    assert rows[1]["demonstrations/cross_entropy"] == pytest.approx(-float(of_tokens.mean()), rel=2e-3)


def test_bapo_shows_a_solution_after_two_failures(train, workspace):
    """Those of step 1 in step 3, where nothing else is trained on. Those of step 2 failed before the checkpoint."""
    rows, groups = trained(train, workspace, "bapo_demonstrations", HARD, adapt__options="failures=2")
    assert [row["demonstrations/trained"] for row in rows] == [0, 0, 8, 8, 16, 16]
    assert [row.get("skipped_update") for row in rows] == [1, 1, None, None, None, None]
    of_tokens = log_probs(workspace, solved_by(groups, 3))
    advantage = (1 - 1 / 5) / (4 / 25 + 1e-6) ** 0.5  # the fifth beside four wrong responses
    p = of_tokens.exp()
    assert rows[2]["demonstrations/tokens"] == len(p)
    assert rows[2]["policy_loss"] == pytest.approx(-advantage * float((p / (p + 0.1)).mean()), rel=5e-3)

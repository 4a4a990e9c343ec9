"""Worked solutions and prefixes on the real stack: each run is killed with kill -9 and resumed."""

import itertools
import json

import pytest
import torch
from test_resume import killed_and_the_same_again
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.record.run_record import read_groups

pytestmark = [pytest.mark.stack, pytest.mark.slow]
SAVED = 3  # steps before the checkpoint; the run is killed in its sixth and last step
COMMON = {  # All of the hard buffer is re-evaluated.
    "adapt__rollout_delay": 1, "adapt__reevaluate_every": 1, "adapt__max_reevaluated_prompts": 48,
    "data__solution_key": "worked", "ckpt__save_steps": SAVED,
}  # fmt: skip
# With one micro-batch, a logged loss is a mean over tokens.
RUN = COMMON | {"algorithm": "bapo_grpo", "algo__kl__init_coef": 0.0, "train__micro_batch_size": 16}
MOST = 8  # tokens of a response
WORKED = {f"{i}+{i % 7}=": str(i + i % 7) for i in range(48)}  # solutions of prompts; no response is right


def trained(train, workspace, name, flags, labels=(0,)):
    """The rows and the groups of a run on this data. Its resumed part repeats the steps after the checkpoint."""
    path, of_rows = workspace / f"{name}.jsonl", itertools.cycle(map(str, labels))
    rows = [{"input": prompt, "label": next(of_rows), "worked": worked} for prompt, worked in WORKED.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = killed_and_the_same_again(train, name, "actor", flags | {"data__prompt_dataset": path})
    return run.rows, read_groups(run.folder)


def solved_by(groups, step):
    """The prompts and solutions that stand for groups of a step, in the order of the groups."""
    by_id = {Prompt(prompt, "0").id: (prompt, worked) for prompt, worked in WORKED.items()}
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


def test_relift_fine_tunes_on_what_waits(train, workspace):
    """Nine prompts together. Six wait when the checkpoint is written; without them the next step has eight."""
    flags = RUN | {"adapt__method": "relift", "adapt__options": "finetune_batch=9"}
    rows, groups = trained(train, workspace, "relift", flags)
    assert [row["demonstrations/trained"] for row in rows] == [0, 9, 9, 9, 9, 9]
    assert [row["demonstrations/waiting"] for row in rows] == [8, 7, 6, 5, 4, 3]
    of_tokens = log_probs(workspace, [*solved_by(groups, 1), *solved_by(groups, 2)[:1]])
    assert rows[1]["demonstrations/tokens"] == len(of_tokens)
    assert rows[1]["demonstrations/cross_entropy"] == pytest.approx(-float(of_tokens.mean()), rel=2e-3)


def test_bapo_shows_a_solution_after_two_failures(train, workspace):
    """Those of step 1 in step 3, where nothing else is trained on. Those of step 2 failed before the checkpoint."""
    flags = RUN | {"adapt__method": "bapo_demonstrations", "adapt__options": "failures=2"}
    rows, groups = trained(train, workspace, "bapo_demonstrations", flags)
    assert [row["demonstrations/trained"] for row in rows] == [0, 0, 8, 8, 16, 16]
    assert [row.get("skipped_update") for row in rows] == [1, 1, None, None, None, None]
    of_tokens = log_probs(workspace, solved_by(groups, 3))
    advantage = (1 - 1 / 5) / (4 / 25 + 1e-6) ** 0.5  # the fifth beside four wrong responses
    p = of_tokens.exp()
    assert rows[2]["demonstrations/tokens"] == len(p)
    assert rows[2]["policy_loss"] == pytest.approx(-advantage * float((p / (p + 0.1)).mean()), rel=5e-3)


def test_prefixes_of_bapo_with_a_critic(train, workspace):
    """The record counts groups with a prefix by themselves. Actor and engine agree on the tokens after it.

    A prompt whose label is 0 is never right, so it has a prefix only of its worked solution.
    """
    labels = (8, 7, 4, 1, 0, 0)
    flags = COMMON | {"algorithm": "ba_ppo", "adapt__options": "prefix_share=1/2", "train__num_episodes": 2}
    rows, groups = trained(train, workspace, "prefixes", flags, labels)
    begun = [group for group in groups if group["source"] == "prefixed"]
    assert {"prefixed", "unsteered", "cut"} >= {group["state"] for group in begun} >= {"prefixed"}
    for group in begun:
        given = group["prefix_tokens"]
        assert 1 <= given < MOST and group["tokens"] <= group["responses"] * (MOST - given)
    assert sum(row["groups/prefixed"] for row in rows[SAVED:]) > 0 < sum(row["groups/reevaluated"] for row in rows)
    for row in rows:
        of_step = [group for group in begun if group["step"] == row["step"]]
        given = sum(group["prefix_tokens"] * group["responses"] for group in of_step)
        if of_step:
            share = given / (given + sum(group["tokens"] for group in of_step))
            assert row["prefix/token_share"] == pytest.approx(share)
        if row["groups/prefixed"]:
            assert row["tv/prefixed"] < 0.05 and row["length/prefixed"] < MOST
    assert all(row["critic_grad_norm"] > 0 for row in rows if row["responses/trained"])
    never = {Prompt(prompt, "0").id for number, prompt in enumerate(WORKED) if labels[number % 6] == 0}
    assert {group["prompt"] in never for group in begun} == {True, False}

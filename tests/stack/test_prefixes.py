"""Prefixes on the real stack: the run is killed with kill -9 and resumed."""

import json

import pytest
from test_resume import killed_and_the_same_again

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.record.run_record import read_groups

pytestmark = [pytest.mark.stack, pytest.mark.slow]
MOST = 8  # tokens of a response
SAVED = 3  # steps before the checkpoint; the run is killed in its sixth step
RUN = {
    "algorithm": "ba_ppo", "adapt__options": "prefix_share=1/2", "adapt__rollout_delay": 1,
    "adapt__reevaluate_every": 1, "adapt__max_reevaluated_prompts": 48, "data__solution_key": "worked",
    "train__num_episodes": 2, "ckpt__save_steps": SAVED,
}  # fmt: skip


def test_bapo_with_a_critic_and_worked_solutions(train, workspace):
    """The record counts groups with a prefix by themselves. Actor and engine agree on the tokens after it.

    A prompt whose label is 0 is never right, so it has a prefix only of its worked solution.
    """
    labels = (8, 7, 4, 1, 0, 0)
    rows = [{"input": f"{i}+{i % 7}=", "label": str(labels[i % 6]), "worked": str(i + i % 7)} for i in range(48)]
    path = workspace / "prefixes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = killed_and_the_same_again(train, "prefixes", "actor", RUN | {"data__prompt_dataset": path})
    rows, groups = run.rows, read_groups(run.folder)
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
    never = {Prompt(f"{i}+{i % 7}=", "0").id for i in range(48) if labels[i % 6] == 0}
    assert {group["prompt"] in never for group in begun} == {True, False}

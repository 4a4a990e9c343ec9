"""Prefixes on the real stack, with both kinds of advantages: each run is killed with kill -9 and resumed."""

import json

import pytest
from test_faults import AHEAD, SWITCHES, same_steps
from test_resume import killed_and_resumed
from test_training import EXTRA_LOGS

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.vocabulary import FAILED, STATES
from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import read_groups

pytestmark = [pytest.mark.stack, pytest.mark.slow]
MOST = 8  # tokens of a response
SAVED = 3  # steps before the checkpoint; the run is killed in its sixth step
RUN = {"adapt__rollout_delay": 1, "adapt__reevaluate_every": 1, "train__num_episodes": 2, "ckpt__save_steps": SAVED}


def check(run, algorithm):
    """The resumed part repeats what was lost, and the record counts groups with a prefix by themselves.

    Actor and engine agree on the tokens after it.
    """
    same_steps(run.rows[: len(run.before)], run.before, first=1)
    rows, groups = run.rows, read_groups(run.folder)
    known = metrics.names(algorithm, optional=True) | {"step", *EXTRA_LOGS}
    assert {name for row in rows for name in row} <= known
    begun = [group for group in groups if group["source"] == "prefixed"]
    assert {"prefixed", "unsteered", "cut"} >= {group["state"] for group in begun} >= {"prefixed"}
    for group in begun:
        given = group["prefix_tokens"]
        assert 1 <= given < MOST and group["tokens"] <= group["responses"] * (MOST - given)
    assert sum(row["groups/prefixed"] for row in rows[SAVED:]) > 0
    for row in rows:
        states = [group["state"] for group in groups if group["step"] == row["step"]]
        assert row["groups/generated"] == len(states) == sum(row[f"groups/{state}"] for state in (*STATES, FAILED))
        of_step = [group for group in begun if group["step"] == row["step"]]
        given = sum(group["prefix_tokens"] * group["responses"] for group in of_step)
        if of_step:
            share = given / (given + sum(group["tokens"] for group in of_step))
            assert row["prefix/token_share"] == pytest.approx(share)
        if row["groups/prefixed"]:
            assert row["tv/prefixed"] < 0.05 and row["length/prefixed"] < MOST
    return rows, begun


def test_bapo_with_a_critic_and_worked_solutions(train, workspace):
    """A prompt whose label is 0 is never right, so it has a prefix only of its worked solution."""
    labels = (8, 7, 4, 1, 0, 0)
    rows = [{"input": f"{i}+{i % 7}=", "label": str(labels[i % 6]), "worked": str(i + i % 7)} for i in range(48)]
    path = workspace / "prefixes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"algorithm": "ba_ppo", "adapt__options": "prefix_share=1/2", "data__solution_key": "worked"}
    values |= {"data__prompt_dataset": path, "adapt__max_reevaluated_prompts": 48}
    rows, begun = check(killed_and_resumed(train, "prefixes", "actor", RUN | values), "ba_ppo")
    assert sum(row["groups/reevaluated"] for row in rows) > 0
    assert all(row["critic_grad_norm"] > 0 for row in rows if row["responses/trained"])
    never = {Prompt(f"{i}+{i % 7}=", "0").id for i in range(48) if labels[i % 6] == 0}
    assert {group["prompt"] in never for group in begun} == {True, False}


def test_prefix_sampling_ahead_of_training(train):
    values = RUN | {"algorithm": "bapo_grpo", "algo__kl__init_coef": 0.0, "adapt__method": "prefix_sampling"}
    check(killed_and_resumed(train, "prefixes_ahead", "actor", values, switches=(*SWITCHES, *AHEAD)), "bapo_grpo")

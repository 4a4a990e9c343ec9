"""Dynamic filtering with batch adaptation, killed with kill -9 while it generates, and resumed."""

from collections import Counter

import pytest
from test_faults import same_steps
from test_resume import killed_and_resumed
from test_training import catalogued

from bapo_openrlhf.adapt.vocabulary import FAILED, STATES
from bapo_openrlhf.record.run_record import read_groups

pytestmark = [pytest.mark.stack, pytest.mark.slow]
SAVED = 3
RUN = {
    "algorithm": "bapo_grpo",
    "algo__dynamic_filtering_enable": "true",
    "algo__kl__init_coef": 0.0,
    "rollout__batch_size": 4,
    "adapt__batch_size": 8,
    "adapt__rollout_delay": 2,
    "adapt__reevaluate_every": 2,
    "adapt__c2": "1/8",
    "adapt__c3": "7/8",
    "train__num_episodes": 2,
    "ckpt__save_steps": SAVED,
}


def test_is_the_run_that_was_never_stopped_and_counts_every_group(train):
    run = killed_and_resumed(train, "dynamic", "engine", RUN, phase="generating")
    rows, groups = run.rows, read_groups(run.folder)
    same_steps(rows[: len(run.before)], run.before, first=1)
    catalogued(rows, "bapo_grpo")
    generated = Counter(group["step"] for group in groups)
    prompts: list[str] = []
    for row in rows:
        assert row["groups/generated"] == generated[row["step"]] == sum(row[f"groups/{s}"] for s in (*STATES, FAILED))
        fresh = [group for group in groups if group["step"] == row["step"] and group["source"] == "fresh"]
        prompts += [group["prompt"] for group in fresh]
        means = [group["mean"] for group in fresh]
        signal = sum(0 < mean < 1 for mean in means)
        assert 4 * (row["prompts/rounds"] - 1) < len(fresh) <= 4 * row["prompts/rounds"] <= 16
        enough = signal >= row["groups/wanted"]
        assert enough or row["prompts/rounds"] == 4 or len(prompts) % 48 == 0  # or the data ends
        assert row["groups/fresh"] <= signal <= row["groups/fresh"] + row["groups/cut"]
        assert row["dynamic_filtering_pass_rate"] == 400 * signal / len(fresh)
    assert len(prompts) == 96 and set(Counter(prompts[:48]).values()) == set(Counter(prompts[48:]).values()) == {1}
    assert len({row["prompts/rounds"] for row in rows}) > 1 and sum(row["groups/replayed"] for row in rows) > 0
    assert rows[0]["groups/wanted"] == 8 > min(row["groups/wanted"] for row in rows)

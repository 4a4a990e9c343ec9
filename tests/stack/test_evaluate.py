"""Evaluations by vLLM itself, in processes of their own: one that is whole, and one that is killed and resumed."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from one_process import begun, ended

from bapo_openrlhf.workbench.evaluation.store import read_rows

pytestmark = pytest.mark.stack

REWARD = Path(__file__).parent / "reward.py"
RUNS = 4


def start(workspace, name, *words):
    """Evaluate the tiny model. One sequence at a time: a response then does not depend on what else is in a batch."""
    command = ["-m", "bapo_openrlhf.cli", "evaluate", "--model", "model", "--name", name]
    command += ["--benchmarks", "own=data.jsonl", "--reward", str(REWARD), "--runs", str(RUNS)]
    command += ["--max-new-tokens", "8", "--max-num-seqs", "1", *map(str, words)]
    return begun(command, workspace, {"BAPO_OPENRLHF_CPU": "1"})


def evaluate(workspace, name, *words):
    output, status = ended(start(workspace, name, *words))
    assert status == 0, output[-6000:]
    return workspace / "runs" / "eval" / name


@pytest.fixture(scope="module")
def whole_evaluation(workspace):
    return evaluate(workspace, "whole", "--limit", 12)


def test_every_problem_is_asked_and_judged(workspace, whole_evaluation):
    rows = read_rows(whole_evaluation, "own")
    asked = [json.loads(line) for line in (workspace / "data.jsonl").read_text().splitlines()[:12]]
    assert {row["input"]: row["label"] for row in rows.values()} == {row["input"]: row["label"] for row in asked}
    for row in rows.values():
        assert row["prompt"] == row["input"]  # its tokenizer has no chat template
        assert [len(row[key]) for key in ("responses", "scores", "tokens", "truncated", "failures")] == [RUNS] * 5
        assert len(set(row["responses"])) > 1, "all runs had one seed"
        assert row["failures"] == [None] * RUNS
        for text, tokens, truncated in zip(row["responses"], row["tokens"], row["truncated"], strict=True):
            assert 1 <= tokens <= 8
            # A special token that ends a response stays in it, as in training.
            assert text.endswith("<eos>") != truncated and (tokens == 8 or not truncated)
    always = [row["scores"] for row in rows.values() if row["label"] == "8"]
    never = [row["scores"] for row in rows.values() if row["label"] == "0"]
    assert always == [[1.0] * RUNS] * 2 and never == [[0.0] * RUNS] * 2


def test_the_table_is_that_of_the_rows(whole_evaluation):
    results = json.loads((whole_evaluation / "results.json").read_text())
    scores = [row["scores"] for row in read_rows(whole_evaluation, "own").values()]
    entry = results["benchmarks"]["own"]
    assert (entry["problems"], entry["in_file"], entry["unjudged"]) == (12, 48, 0)
    assert entry["metrics"]["avg@4"]["value"] == pytest.approx(100 * np.mean(scores))
    assert entry["metrics"]["pass@4"]["value"] == pytest.approx(100 * np.mean(np.max(scores, axis=1)))
    assert "vllm" in " ".join(results["versions"])


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(workspace, whole_evaluation):
    """The first problems have the rows of an evaluation that asked fewer."""
    folder = workspace / "runs" / "eval" / "killed"
    process = start(workspace, "killed")
    deadline = time.monotonic() + 300
    while process.poll() is None and len(read_rows(folder, "own")) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = read_rows(folder, "own")
    assert 3 <= len(before) < 48, "it was killed too early or too late"
    evaluate(workspace, "killed")
    after = read_rows(folder, "own")
    assert len(after) == 48 and after.items() >= before.items()
    assert after.items() >= read_rows(whole_evaluation, "own").items()

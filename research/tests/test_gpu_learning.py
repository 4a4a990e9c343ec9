"""gpu_learning.py as far as no run is needed: steps by seconds, equal bits, and the page."""

import json
import math
from pathlib import Path

import gpu_learning
import pytest

from bapo_openrlhf.cpu import stack as cpu


@pytest.fixture
def learning(tmp_path, monkeypatch):
    """learning(**flags): what a dry run is made of, with these flags."""
    monkeypatch.setenv(cpu.SWITCH, "1")

    def make(parts=None, **flags):
        given, more = gpu_learning.parse(["--dry-run", "--out", str(tmp_path)])
        vars(given).update(flags)
        (tmp_path / "gpu_learning.json").write_text(json.dumps({"parts": parts or {}}))
        monkeypatch.setattr(gpu_learning, "make_inputs", lambda *_: dict.fromkeys(
            ("data.prompt_dataset", "actor.model_name_or_path", "reward.remote_url"), "file"))  # fmt: skip
        return gpu_learning.Learning(given, more, tmp_path)

    return make


def arm(steps, seconds=None):
    return {"steps": steps, "rows": [], "missing": ""} | ({"seconds": seconds} if seconds else {})


@pytest.mark.parametrize(
    ("parts", "seconds", "expected"),
    [
        ({}, 143 + 2 * 61, 60),  # nothing was measured: a start of 143 s and 2 s a step; an even number
        ({}, 143 + 2 * 1.9, 0),
        ({}, 20, 0),
        ({}, math.inf, 200),
        ({"grpo": arm(60, [80.0, 1.0])}, 80 + 1000, 60),  # as many as the arm that it is compared with
        ({"grpo": arm(60, [80.0, 4.0]), "ba_ppo": arm(60, [100.0, 3.0])}, 100 + 4 * 12, 12),
        ({"before": arm(0), "bits_1": arm(10, [1.0, 1.0])}, 143 + 2 * 100, 100),  # neither is an arm
    ],
)
def test_steps_that_fit(learning, parts, seconds, expected):
    assert learning(parts, steps=0).steps(seconds) == expected


def test_parts_share_the_seconds_that_are_left(learning, monkeypatch):
    made, seen = learning(steps=0, seconds=820.0), []
    monkeypatch.setattr(made.budget, "clock", lambda: clock[0])
    clock = [made.budget._end - 800.0]

    def train(label, arm, steps, seconds):
        seen.append((arm, round(seconds)))
        clock[0] += 300.0

    monkeypatch.setattr(made, "train", train)
    made.run(["grpo", "bapo_grpo"])
    assert seen == [("grpo", 400), ("bapo_grpo", 500)]


def test_differences_to_the_bit():
    one = [{"step": 1, "loss": 0.1, "timing/adapt": 1.0, "rollouts/seconds": 2.0, "groups/in_flight": 3, "end": 4.0},
           {"step": 2, "loss": 0.5, "grad": math.nan}]  # fmt: skip
    other = [{"step": 1, "loss": 0.1, "timing/adapt": 9.0, "rollouts/seconds": 9.0, "groups/in_flight": 9, "end": 9.0},
             {"step": 2, "loss": math.nextafter(0.5, 1), "grad": math.nan, "new": 1}]  # fmt: skip
    assert gpu_learning.differences(one, one) == []
    assert gpu_learning.differences(one, other) == ["loss from step 2", "new from step 2"]
    assert len(gpu_learning.differences(one, one[:1])) == 1


def test_rows_come_in_the_order_in_which_they_were_recorded(tmp_path):
    """So that a look at a run that goes on only adds rows at the end."""
    rows = {"metrics": [{"step": 1}, {"step": 2}], "evaluations": [{"step": 1, "eval_three_pass1": 0.25}]}
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gpu_learning.rows_of_run(tmp_path) == [
        {"step": 1}, {"step": 1, "evaluation": {"three": 0.25}}, {"step": 2},
    ]  # fmt: skip
    assert gpu_learning.rows_of_run(tmp_path / "none") == []


def test_the_evaluation_before(tmp_path):
    """The kept one of the study: five levels, of which three has 28.125 % of right responses."""
    kept = Path(gpu_learning.__file__).parents[1] / "results" / "smollm2" / "start.csv"
    assert gpu_learning.rows_of_evaluation(tmp_path) == []
    (tmp_path / "results.csv").write_text(kept.read_text())
    ((row,),) = [gpu_learning.rows_of_evaluation(tmp_path)]
    assert row["step"] == 0 and set(row["evaluation"]) == set(gpu_learning.LEVELS)
    assert row["evaluation"]["three"] == 0.28125


def test_the_page():
    origin = {"machine": "x86_64, one GPU", "commit": "abc", "command": "python it"}
    done = [{"step": 1, "rollouts/total": 64, "end": 1.0}, {"step": 1, "evaluation": {"three": 0.5, "four": 0.25}},
            {"step": 2, "rollouts/total": 1128, "end": 3.0}]  # fmt: skip
    parts = {"grpo": {"steps": 4, "rows": done, "missing": "the time | was over", "seconds": [80.0, 2.0]} | origin,
             "before": {"steps": 0, "rows": [], "missing": ""} | origin}  # fmt: skip
    text = gpu_learning.page({"parts": parts, "bits": {"steps": 10, "differences": []}})
    assert "| GRPO | 2 of 4 | 1,128 | 2.00 | 37.5 (step 1) | the time / was over |" in text
    assert "10 steps with one seed are equal to the bit." in text and text.count("x86_64") == 1
    text = gpu_learning.page({"parts": parts, "bits": {"steps": 10, "differences": ["loss from step 2"]}})
    assert "differ in 1 metrics: loss from step 2." in text


def test_what_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(cpu.SWITCH, "0")
    for words, named in (([], "before"), (["grpo", "--model", str(tmp_path / "none")], "--model")):
        with pytest.raises(SystemExit):
            gpu_learning.parse(words)
        assert named in capsys.readouterr().err
    monkeypatch.setenv(cpu.SWITCH, "1")
    with pytest.raises(SystemExit):
        gpu_learning.parse(["grpo", "--model", str(tmp_path)])
    assert "--dry-run" in capsys.readouterr().err

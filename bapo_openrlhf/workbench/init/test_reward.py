"""The reward function says what is right. Run `pytest` in this folder after each change of the rewards or the data."""

import json
import runpy
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
REWARD = runpy.run_path(str(HERE / "reward.py"))["reward_func"]
DATA = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))["data"]
ROWS = {
    f"{name}.jsonl, line {number}": line
    for name in ("train", "eval")
    for number, line in enumerate((HERE / f"{name}.jsonl").read_text(encoding="utf-8").split("\n"), 1)
    if line
}


def reward(response, label, prompt="What is 6 x 7?"):
    return REWARD([prompt + response], [prompt], [label], [response])["rewards"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("6 x 7 is 42.\nAnswer: 42", 1),
        ("Answer: 42.0<|im_end|>", 1),
        ("**Answer:** 42", 1),
        ("Answer: 41. No, Answer: 42", 1),
        ("Answer: 42. No, Answer: 41", 0),
        ("Answer: 420", 0),
        ("It is 42.", 0),
        ("", 0),
    ],
)
def test_responses(response, expected):
    assert reward(response, "42") == [expected]


def test_an_answer_in_the_prompt_does_not_count():
    assert reward("I do not know.", "42", prompt="Write it as Answer: 42") == [0]


@pytest.mark.parametrize("place", ROWS)
def test_every_row_can_be_solved(place):
    row = json.loads(ROWS[place])
    problem, label = row[DATA["input_key"]], row[DATA["label_key"]]
    right, wrong = f"Answer: {label}", f"Answer: {float(label) + 1}"
    assert (reward(right, label, problem), reward(wrong, label, problem)) == ([1], [0])

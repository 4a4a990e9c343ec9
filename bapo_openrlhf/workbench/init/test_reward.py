"""The reward function says what is right. Run `pytest` in this folder after each change of the rewards or the data."""

import json
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REWARD = runpy.run_path(str(HERE / "reward.py"))["reward_func"]
TEXTS = [(HERE / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("train", "eval")]
ROWS = [json.loads(line) for text in TEXTS for line in text.split("\n") if line]


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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["input"][:40])
def test_every_row_can_be_solved(row):
    right, wrong = f"Answer: {row['label']}", f"Answer: {float(row['label']) + 1}"
    assert (reward(right, row["label"], row["input"]), reward(wrong, row["label"], row["input"])) == ([1], [0])

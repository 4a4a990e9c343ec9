"""GSM8K: rows become labels and worked solutions, and responses are judged.

All rows here are made for these tests. They have the columns of the published data and copy nothing from it.
"""

import json

import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.tasks import get_task
from bapo_openrlhf.workbench.evaluation.problems import Request, Sampling, load
from bapo_openrlhf.workbench.prepare.build import Preparation, prepare

# Made rows: the answer, its label and its worked solution, all written by hand.
GOOD = {
    "thousands": ("The mill grinds 1,250*4=<<1250*4=5000>>5,000 sacks.\n#### 5,000", "5000",
                  "The mill grinds 1,250*4=5,000 sacks.\nThe final answer is \\boxed{5000}"),
    "negative": ("The diver goes down to <<0-1012=-1012>>-1,012 m.\n#### -1,012", "-1012",
                 "The diver goes down to -1,012 m.\nThe final answer is \\boxed{-1012}"),
    "both": ("Rent is $<<2*617.25=1234.5>>1,234.50.\n#### 1,234.50", "1234.50",
             "Rent is $1,234.50.\nThe final answer is \\boxed{1234.50}"),
    "no_zero": ("Half is left.\n#### .5", ".5", "Half is left.\nThe final answer is \\boxed{.5}"),
    "two_in_a_line": ("First <<1+1=2>>2, then <<2+5=7>>7 < 9 days.\nSo 7.\n####7\n", "7",
                      "First 2, then 7 < 9 days.\nSo 7.\nThe final answer is \\boxed{7}"),
    "marked_twice": ("Bus #### 12 has 8 seats.\n#### 8", "8",
                     "Bus #### 12 has 8 seats.\nThe final answer is \\boxed{8}"),
}  # fmt: skip
BAD = {  # Made rows, too: the answer and the reason for its rejection.
    "There are 2+2=<<2+2=4>>4 hens.": "no #### in the answer: 'There are 2+...+2=4>>4 hens.'",
    "Four hens.\n#### ": "no number after ####: ' '",
    "Four hens.\n#### 4 or 5": "no number after ####: ' 4 or 5'",
    "Four hens.\n#### -": "no number after ####: ' -'",
    " ": "answer is empty",
    24: "no #### in the answer: 24",
}
ROWS = [{"question": f" Made question {name}?\n", "answer": answer} for name, (answer, _, _) in GOOD.items()]
ROWS += [{"question": f"Bad made question {number}?", "answer": answer} for number, answer in enumerate(BAD)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def data(tmp_path):
    """The folder of data that `prepare` wrote from a local copy with made rows."""
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prepare(get_task("gsm8k"), Preparation(out=tmp_path / "data" / "gsm8k", local={"gsm8k": path}, parts=("gsm8k",)))
    return tmp_path / "data"


def test_made_rows_are_prepared(data):
    result = lines(data / "gsm8k" / "gsm8k.jsonl")
    assert [(row["label"], row["solution"]) for row in result] == [(label, text) for _, label, text in GOOD.values()]
    assert result[0]["input"] == (
        "Made question thousands? Let's think step by step and output the final answer within \\boxed{}."
    )
    rejected = lines(data / "gsm8k" / "gsm8k.rejected.jsonl")
    assert [(row["row"], row["reason"]) for row in rejected] == list(enumerate(BAD.values(), len(GOOD) + 1))


# The judge is that of mathematics, whose tests have more answers.
RESPONSES = [  # the made row, the response, its reward, and whether it has an answer in a box
    ("thousands", r"They are \boxed{5,000}.", 1.0, 1.0),
    ("thousands", r"\boxed{500}", 0.0, 1.0),
    ("no_zero", r"\boxed{1/2}", 1.0, 1.0),
    ("thousands", "The mill grinds <<1250*4=5000>>5,000.\n#### 5,000", 0.0, 0.0),
    *((name, solution, 1.0, 1.0) for name, (_, _, solution) in GOOD.items()),
]


def test_responses_to_made_rows_are_judged(data):
    """The benchmark is loaded as `evaluate` loads it. Its reward file is the one that a run names."""
    benchmark = load("gsm8k", Request("model", "name", ["gsm8k"], data, Sampling(1, 1.0, 1.0, -1, 20, 42), [1], data))
    assert (benchmark.title, benchmark.size) == ("GSM8K", len(GOOD))
    assert benchmark.reward.parts[-3:] == ("bapo_openrlhf", "tasks", "gsm8k.py")
    reward = user_file.load("reward.remote_url", benchmark.reward)
    rows = dict(zip(GOOD, benchmark.problems, strict=True))
    asked = [(rows[name], response) for name, response, _, _ in RESPONSES]
    result = reward.reward_func(
        [f"<s>{row.input}{response}" for row, response in asked],
        [row.input for row, _ in asked],
        [row.label for row, _ in asked],
    )
    judged = zip(map(float, result["rewards"]), map(float, result["extra_logs"]["boxed"]), strict=True)
    assert [(*case[:2], *pair) for case, pair in zip(RESPONSES, judged, strict=True)] == RESPONSES
    assert reward.answer(r"\boxed{5,000 \text{ sacks}}") == reward.answer(r"\boxed{5000}") == "5000"  # majority votes

"""Partial credit for worked sums: against numbers by hand."""

import json

import partial_sums
import pytest

from bapo_openrlhf.tasks import reasoning_gym

EXPRESSION = "8 + 5 - 4"
QUESTION = f"State the final answer to the following arithmetic problem: {EXPRESSION} ="
METADATA = {"source_dataset": "chain_sum", "source_index": 1, "expression": EXPRESSION}
LABEL = repr({"task": "chain_sum", "parameters": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
              "entry": {"question": QUESTION, "answer": "9", "metadata": METADATA}})  # fmt: skip


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("8 + 5 = 13. 13 - 4 = 9. ", 1.0),
        ("13 - 4 = 9. 8 + 5 = 13. ", 1.0),  # in any order
        ("8 + 5 = 12. 12 - 4 = 8. ", 0.0),
        ("8 + 5 = 13. 13 - 4 = 8. ", 0.5),
        ("18 + 5 = 13. 13 - 4 = 90. ", 0.0),  # a part of another step is none
        ("8 + 5 = 13. 8 + 5 = 13. ", 0.5),
    ],
)
def test_the_share_of_right_steps(response, share):
    assert partial_sums.right_steps(response, EXPRESSION) == share


def test_only_marked_problems_have_partial_credit():
    pytest.importorskip("reasoning_gym")
    right, wrong = "8 + 5 = 13. 13 - 4 = 9. <answer>9</answer>", "8 + 5 = 13. 13 - 4 = 8. <answer>8</answer>"
    line = partial_sums.marked(json.dumps({"input": QUESTION, "label": LABEL}))
    row = json.loads(line)
    assert line.endswith("}\n") and row["input"] == QUESTION and row["label"].endswith(LABEL)
    queries = [f"<s>{QUESTION}{text}" for text in (right, wrong, right, wrong)]
    labels = [row["label"], row["label"], LABEL, LABEL]
    result = partial_sums.reward_func(queries, [QUESTION] * 4, labels)
    plain = reasoning_gym.reward_func(queries, [QUESTION] * 4, [LABEL] * 4)["rewards"]
    a, b = (float(plain[place]) for place in (0, 1))
    assert a == 1 and b < 1
    assert [float(reward) for reward in result["rewards"]] == pytest.approx([1, (b + 0.5) / 2, a, b])
    assert result["scores"] is result["rewards"] or list(result["scores"]) == list(result["rewards"])

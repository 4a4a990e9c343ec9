"""Labels of the built-in tasks: an answer that is made of one must be right."""

import pytest

from bapo_openrlhf.tasks import get_task

RAW = "He has 0 and 3 more.\nThat is 0+3=<<0+3=3>>3 pens.\n#### 3"
STRUCTURE = {"ground_truth": "3", "style": "rule"}


def data_of(check, labels):
    return check.write(".jsonl", [{"q": f"{number}?", "a": label} for number, label in enumerate(labels)])


@pytest.mark.parametrize("name", ["math", "gsm8k", "geometry"])
def test_labels_that_no_answer_equals_are_refused_and_some_are_named(check, name):
    takes = get_task(name).takes
    assert not any(map(takes, (RAW, STRUCTURE, ["3"])))
    assert all(map(takes, ("3", 3, 2.5, r"\frac{1}{2}", "(B) 16", "Monday")))
    (warning,) = check(data_of(check, ["3", RAW, RAW, ""]), takes=takes).warnings
    assert ", row 2: the label is " in warning and "2 of 4 rows" in warning
    assert check.refusal(data_of(check, ["", RAW, RAW]), takes=takes).startswith("row 2: the label is ")


def test_labels_of_reasoning_gym(check):
    pytest.importorskip("reasoning_gym")
    takes, entry = get_task("reasoning_gym").takes, {"question": "1 + 3 = ?", "answer": "4", "metadata": {}}
    label = repr({"task": "chain_sum", "parameters": {}, "entry": entry})
    for labels, warned in (([label], 0), ([label, "4"], 1)):
        assert len(check(data_of(check, labels), takes=takes).warnings) == warned

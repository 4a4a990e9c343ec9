"""Labels of the built-in tasks: an answer that is made of one must be right."""

from __future__ import annotations

import pytest

from bapo_openrlhf.tasks import get_task

RAW = "He has 0 and 3 more.\nThat is 0+3=<<0+3=3>>3 pens.\n#### 3"
STRUCTURE = {"ground_truth": "3", "style": "rule"}


@pytest.fixture
def warnings_of(check):
    def warnings(labels, takes):
        rows = [{"q": f"{number}?", "a": label} for number, label in enumerate(labels)]
        return check(check.write(".jsonl", rows), takes=takes).warnings

    return warnings


@pytest.mark.parametrize("name", ["math", "gsm8k", "geometry"])
def test_labels_that_no_answer_equals_are_refused_and_some_are_named(check, warnings_of, name):
    takes = get_task(name).takes
    assert not any(map(takes, (RAW, STRUCTURE, ["3"])))
    assert all(map(takes, ("3", 3, 2.5, r"\frac{1}{2}", "(B) 16", "Monday")))
    (warning,) = warnings_of(["3", RAW, RAW, ""], takes)
    assert ", row 2: the label is " in warning and "2 of 4 rows" in warning
    rows = [{"q": f"{number}?", "a": label} for number, label in enumerate(("", RAW, RAW))]
    assert check.refusal(check.write(".jsonl", rows), takes=takes).startswith("row 2: the label is ")


def test_labels_of_reasoning_gym(warnings_of):
    pytest.importorskip("reasoning_gym")
    takes, entry = get_task("reasoning_gym").takes, {"question": "1 + 3 = ?", "answer": "4", "metadata": {}}
    label = repr({"task": "chain_sum", "parameters": {}, "entry": entry})
    assert warnings_of([label], takes) == [] and len(warnings_of([label, "4"], takes)) == 1


def test_those_that_cannot_be_tried(warnings_of):
    assert warnings_of([STRUCTURE], None) == []

"""Labels of the built-in tasks: an answer that is made of one must be right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bapo_openrlhf.data.findings import Findings
from bapo_openrlhf.data.labels import Labels
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import get_task

RAW = "He has 0 and 3 more.\nThat is 0+3=<<0+3=3>>3 pens.\n#### 3"
STRUCTURE = {"ground_truth": "3", "style": "rule"}


def said(labels, reward) -> list[str]:
    looked, findings = Labels(str(reward)), Findings()
    for number, label in enumerate(labels, 1):
        looked.look(f"row {number}", label)
    looked.say(findings)
    findings.check()
    return findings.warnings


@pytest.mark.parametrize("name", ["math", "gsm8k", "geometry"])
@pytest.mark.parametrize("wrong", [RAW, STRUCTURE, ["3"]])
def test_labels_that_no_answer_equals_are_refused_and_some_are_named(name, wrong):
    file = get_task(name).file
    assert said(["3", 3, 2.5, r"\frac{1}{2}", "(B) 16", "Monday", ""], file) == []
    (warning,) = said(["3", wrong, wrong], file)
    assert warning.startswith("row 2: ") and "2 of 3 rows" in warning
    with pytest.raises(ConfigError, match=r"row 1: .*all 2 rows"):
        said([wrong, wrong], file)


def test_labels_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    task, entry = get_task("reasoning_gym"), {"question": "1 + 3 = ?", "answer": "4", "metadata": {}}
    label = repr({"task": "chain_sum", "parameters": {}, "entry": entry})
    assert said([label], task.file) == [] and len(said([label, "4"], task.file)) == 1


@pytest.mark.parametrize("reward", ["reward.py", "http://localhost:5000", "bapo_openrlhf/tasks/math.txt", None])
def test_files_of_users_are_not_tried(tmp_path, reward):
    looked = Labels(reward if reward is None else str(tmp_path / reward) if reward == "reward.py" else reward)
    looked.look("row 1", STRUCTURE)
    looked.say(SimpleNamespace())

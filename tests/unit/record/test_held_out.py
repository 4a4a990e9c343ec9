"""The held-out evaluations of a run, in words."""

import pytest

from bapo_openrlhf.record.held_out import change_in_words


def rows(*evaluations):
    return [
        {"step": 5 * number, "eval_num_samples": 8} | {f"eval_{name}_pass1": score for name, score in scores.items()}
        for number, scores in enumerate(evaluations, 1)
    ]


@pytest.mark.parametrize(("evaluations", "words"), [
    ([], ""),
    ([{}, {"a": None}], ""),
    ([{"a": 0.25, "b": 0.5}], "a 0.250, b 0.500 (step 5)"),
    ([{}, {"a": 0.25}, {"a": 0.5}, {"a": 1}, {}], "a 0.250 to 1.000 (steps 10 to 20)"),
    # The data was changed on a resume.
    ([{"a": 0.25}, {"b": 0.5}], "b 0.500 (step 10)"),
    ([{"a": 0.25}, {"b": 0.5}, {"b": 0.75}], "b 0.500 to 0.750 (steps 10 to 15)"),
    ([{"a": 0.25}, {"a": 0.5, "b": 0.5}], "a 0.250 to 0.500, b 0.500 (steps 5 to 10)"),
])  # fmt: skip
def test_the_change(evaluations, words):
    assert change_in_words(rows(*evaluations)) == words

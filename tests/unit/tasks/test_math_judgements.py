"""The table of right and wrong answers by kind, judged as a response is.

Each row has the content of a box and a label. The rows with blind = 1 were written by somebody who did not know the
rules of the judge. The others were written before the rules.
"""

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.tasks import forms, notation
from bapo_openrlhf.tasks import math as task

ROWS = list(csv.DictReader((Path(__file__).parent / "math_judgements.csv").open(encoding="utf-8")))
MISJUDGED = [  # These are right.
    (r"\text{20 June}", r"\text{June 20}"),  # Dates in words are compared as they are written.
    (r"x<-1\text{ or }x>3", r"(-\infty,-1)\cup(3,\infty)"),  # Several inequalities are no set.
]


def score(answer, label):
    return task.score(rf"So it is $\boxed{{{answer}}}$.<|im_end|>", label)


@pytest.mark.parametrize(("kind", "right"), sorted({(row["kind"], row["right"]) for row in ROWS}))
def test_each_kind_of_answer_is_judged_as_a_person_does(kind, right):
    rows = [(row["answer"], row["label"]) for row in ROWS if (row["kind"], row["right"]) == (kind, right)]
    assert [pair for pair in rows if score(*pair) != float(right)] == [pair for pair in rows if pair in MISJUDGED]


@pytest.mark.parametrize(("answer", "label"), [
    (r"9^{9^{9^{9}}}", r"9^{9^{9}}"),
    ("100000!", "3^x"),
    ("((3!)!)!", "x"),
    (r"2^{99999999999}", r"\sqrt{2}"),
    (r"123456789^{9999}", r"\sqrt{2}"),
    (r"(10^{999})^{999}", r"\pi"),
    (r"\binom{1000000000}{500000000}", "x"),
    (r"\sin(10^{10^{10}})", "0"),
    ("x", r"2^{3^{4^{5}}}"),
])  # fmt: skip
def test_large_numbers_are_never_evaluated(answer, label, monkeypatch):
    monkeypatch.setattr(task, "_same", lambda *_: pytest.fail("it was evaluated"))
    assert score(answer, label) == 0.0
    assert score(answer, answer) == 1.0


@pytest.mark.parametrize(("written", "value", "unit"), [
    (r"5\,\mathrm{kg\cdot m/s^{2}}", "5", "kilogram meter/second^2"),
    (r"5\text{ meters per second squared}", "5", "meter/second^2"),
    ("5 sq. ft.", "5", "foot^2"),
    (r"20^\circ\text{C}", "20", "degree celsius"),
    ("2.5 million dollars", "2500000", "dollar"),
    ("8:30 P.M.", "8:30", "pm"),
    (r"7\text{ glasses}", "7", "glasse"),
    ("3 m", "3 m", ""),
    (r"3\text{ if n is even}", r"3\text{if n is even}", ""),
    (r"3\text{ q}", r"3\text{q}", ""),
    (r"\text{Area}=3\text{ cm}^2", r"\text{Area}=3", "centimeter^2"),
])  # fmt: skip
def test_a_unit_is_told_from_other_text(written, value, unit):
    assert notation.parts(written) == (value, unit)


@pytest.mark.parametrize(
    ("text", "parts"), [("1, (2, 3), {4, 5}", ["1", "(2, 3)", "{4, 5}"]), ("", [""]), ("a), b", ["a)", "b"])]
)
def test_split_keeps_brackets_whole(text, parts):
    assert forms.split(text, ",") == parts


PIECES = (
    *"0123456789.,:=+-*/^_()[]{}%!° ×√½²aeimxAB€",
    *(r"\frac", r"\sqrt", r"\text{", r"\mathrm{", r"\overline", r"^\circ", r"\$", r"\{", r"\}", r"\times 10"),
    *(r"\approx", r"\sin", r"\begin{pmatrix}", " million", " cm", "p.m.", " or "),
)  # fmt: skip


@given(*[st.lists(st.sampled_from(PIECES), max_size=12).map("".join)] * 2)
@settings(max_examples=10 * settings.default.max_examples)
def test_any_answer_and_label_are_judged(answer, label):
    """No text raises, and an answer is equal to itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "_same", lambda value, reference: False)
        task.equal(answer, label)
        assert task.equal(answer, answer) == bool(notation.parts(answer)[0])

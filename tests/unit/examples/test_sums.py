"""The quickstart's sums: answers and labels against Python's own arithmetic, slips, and the reward."""

import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf import user_file

FOLDER = Path(__file__).parents[3] / "examples" / "quickstart"
sums = user_file.load("sums", FOLDER / "sums.py")
NUMBERS = st.integers(1, 9)
SUMS = st.builds(sums.Sum, NUMBERS, st.lists(st.tuples(st.sampled_from("+-"), NUMBERS), min_size=1, max_size=6))


@given(SUMS)
def test_each_step_is_true_and_the_last_one_is_the_sum(one):
    answer = one.worked(one.results())
    assert all(eval(left) == int(right) for left, right in (step.split("=") for step in answer.split(" ")))
    assert int(answer.split("=")[-1]) == eval(one.prompt.removesuffix(":"))


@given(SUMS, st.floats(0, 1), st.randoms(use_true_random=False))
def test_only_steps_that_cross_a_ten_slip_and_later_ones_go_on_with_it(one, slip, rng):
    before = one.first
    for (sign, number), after in zip(one.steps, one.results(slip, rng), strict=True):
        right = before + number if sign == "+" else before - number
        assert after in ({right, right - 1} if right // 10 != before // 10 and slip else {right})
        before = after


def test_slips_are_as_frequent_as_set():
    one, rng = sums.Sum(9, [("+", 1)]), random.Random(0)
    assert 0.27 < sum(one.results(0.3, rng) == [9] for _ in range(2000)) / 2000 < 0.33


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("7+5=12 12-8=4<eos>", 1), ("7+5=12 12-8=3<eos>", 0), ("7+5=12 12-8=4 4", 1), ("4", 0), ("", 0), ("=-4", 0)],
)
def test_the_last_result_is_what_counts(answer, reward):
    assert sums.reward_func([f"7+5-8:{answer}"], ["7+5-8:"], ["4"], [answer])["rewards"] == [reward]


def test_no_problem_is_both_trained_on_and_held_out(tmp_path):
    sums.write(tmp_path, 500)
    files = [tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"]
    parts = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [len(part) for part in parts] == [500, sums.HELD_OUT * len(sums.TERMS)]
    inputs = [row["input"] for row in itertools.chain(*parts)]
    assert len(set(inputs)) == len(inputs)
    assert all(int(row["label"]) == eval(row["input"].removesuffix(":")) for row in itertools.chain(*parts))
    terms = [len(re.findall(r"\d", row["input"])) for row in parts[1]]
    assert {count: terms.count(count) for count in terms} == dict.fromkeys(sums.TERMS.values(), sums.HELD_OUT)


def test_the_model_is_taught_no_held_out_problem_and_slips_only_at_last(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    settings = user_file.load("sums_model", FOLDER / "sums_model.py").SumsModelSettings(slip=1.0)
    rng = random.Random(0)
    for clean in (True, False):
        drawn = [settings.draw(rng, "six_terms", clean) for _ in range(300)]
        known = [pair for pair in drawn if pair is not None]
        assert 0 < len(drawn) - len(known) < 80
        right = [int(answer.split("=")[-1]) == eval(prompt.removesuffix(":")) for prompt, answer in known]
        assert all(right) if clean else 0 < sum(right) < len(right) / 2
    sys.modules.pop("sums", None)

"""The sentence that a report begins with. The expected numbers are computed by hand.

Runs of less than 40 steps are smoothed over 3 steps, so a step from 0 to 1 becomes 0, 1/3, 2/3, 1.
"""

import pytest

from bapo_openrlhf.workbench.report.opening import opening
from bapo_openrlhf.workbench.report.runs import Run


def run_of(name, rewards, seconds=60, responses=100, **config):
    """A run with these rewards. Each step takes so many seconds and generates so many responses."""
    rows = [{"step": step, "reward/fresh_mean": reward, "timing/step_total": seconds,
             "rollouts/total": step * responses} for step, reward in enumerate(rewards, start=1)]  # fmt: skip
    return Run(name, rows, {"config": config} if config else {})


def stairs(low, high, top=1.0):
    """`low` rewards of 0, then `high` rewards of `top`. The smoothed reward is `top` from step `low` + 2 on."""
    return [0.0] * low + [top] * high


def test_the_first_to_reach_a_level_and_its_shares():
    # a: step 5, 5 min, 1000 responses. b: step 10, 10 min, 1000 responses.
    a, b = run_of("a", stairs(3, 4), responses=200), run_of("b", stairs(8, 3))
    said = opening([a, b])
    assert said.startswith("a reached a mean reward of 1 in 0.50 of the time of b (5 min instead of 10 min) and with ")
    assert "about as many responses as b (1,000 and 1,000)" in said and "7, 11" in said
    assert opening([b, a]) == said.replace("7, 11", "11, 7")


def test_the_level_is_the_best_of_the_weakest_run():
    # a passes 0.5 at step 4, where it is 2/3; b reaches 0.5 at step 10; c passes 0.5 at step 8.
    a, b = run_of("a", stairs(3, 8), responses=500), run_of("b", stairs(8, 3, top=0.5))
    said = opening([a, b, run_of("c", stairs(7, 4), responses=10)])
    assert said.startswith("a reached a mean reward of 0.5 in 0.50 of the time of c (4 min instead of 8 min)")
    assert "; in 0.40 of the time of b (4 min instead of 10 min) and with 2.00 of the responses of b (2,000 " in said


@pytest.mark.parametrize(("low", "words"), [
    # Two standard errors: a 2 sqrt(1/6 / 2 / 3), b the same, so 2 sqrt(2 / 36) = 0.471 of both together.
    (4, "in about the time of b (5 min and 6 min)"),  # after 5 min b is at 2/3 = 1 - 0.333
    (5, "in 0.71 of the time of b (5 min instead of 7 min)"),  # after 5 min b is at 1/3 = 1 - 0.667
])  # fmt: skip
def test_a_run_that_is_hardly_behind_is_about_equal(low, words):
    assert words in opening([run_of("a", stairs(3, 4)), run_of("b", stairs(low, 7 - low))])


def test_a_run_that_did_not_rise_gives_no_level():
    # b changes by 0.2 each step: two errors of a difference are 2 sqrt(2) sqrt(0.04 / 2 / 3) = 0.231. It rises 0.033.
    a, b = run_of("a", stairs(3, 4)), run_of("b", [0.2, 0.4, 0.2, 0.4, 0.2, 0.4])
    said = opening([a, b])
    assert said.startswith("b never rose above its first reward (0.3) by more than chance explains")
    assert said.endswith("The highest smoothed rewards are 1 (a), 0.333 (b).")


def test_runs_of_different_tasks_are_not_compared():
    first, other = run_of("a", stairs(3, 4)), run_of("b", stairs(8, 3))
    assert opening([first, other]).startswith("a reached")  # what they learned from is not recorded
    for left, right, same in (("x", "x", True), ("x", "y", False)):  # digests
        first.metadata["inputs"], other.metadata["inputs"] = ({"data.prompt_dataset": one} for one in (left, right))
        assert ("different tasks (--data.prompt_dataset)" in opening([first, other])) is not same


def test_one_run():
    # Thirds of 6 steps: the first 2 and the last 2.
    run = run_of("a", [0.1, 0.3, 0.4, 0.5, 0.6, 0.8], seconds=34.7)
    words = "a: the mean reward rose from 0.2 (first 2 steps) to 0.7 (last 2 steps) in 6 steps, "
    # The changes are 0.2, 0.1, 0.1, 0.1, 0.2: two errors of a difference are 2 sqrt(2) sqrt(0.022 / 2 / 2) = 0.210.
    assert opening([run]) == words + "which took 3 min 28 s, and 600 responses."
    # With 0.2, 0.5, 0.6, 0.5 and 0: 2 sqrt(2) sqrt(0.18 / 2 / 2) = 0.6, and the change is -0.5.
    fell = "a: the mean reward fell from 0.8 (first 2 steps) to 0.3 (last 2 steps), which may be chance, in 6 steps"
    assert opening([run_of("a", [0.9, 0.7, 0.2, 0.8, 0.3, 0.3])]).startswith(fell)


def test_what_is_not_recorded_is_left_out():
    a, b = run_of("a", stairs(3, 4), seconds=None), run_of("b", stairs(8, 3))
    assert opening([a, b]).startswith("a reached a mean reward of 1 with 0.50 of the responses of b (500 instead of ")
    assert opening([a]).endswith("in 7 steps and 700 responses.")
    assert "neither times nor responses" in opening([a, run_of("b", stairs(8, 3), responses=float("nan"))])
    assert opening([a, run_of("c", [None, None])]) == "c: no reward is recorded, so nothing can be said about learning."
    assert opening([run_of("a", [0.25])]).startswith("a has one reward so far, 0.25")

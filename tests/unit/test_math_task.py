"""The math reward: the last boxed answer against the label, by OpenRLHF's verifier."""

import pytest

from bapo_openrlhf import cpu

cpu.prepare_environment()
cpu.install()

from bapo_openrlhf.tasks import math as task  # noqa: E402


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        (r"so the answer is \boxed{42}", "42", True),
        (r"first \boxed{1}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{41}", "42", False),
        ("42", "42", False),
        ("", "42", False),
        (r"\boxed{", "42", False),
        (r"\boxed{7}", 7, True),
    ],
)
def test_score(response, label, right):
    assert task.score(response, label) == float(right)


def test_reward_func_reads_the_response_and_not_the_prompt():
    prompt = r"Put it within \boxed{}. What is 6 x 7? "
    result = task.reward_func([prompt + r"\boxed{42}", prompt + "no idea"], [prompt, prompt], ["42", ""])
    assert result["rewards"].tolist() == [1.0, 0.0]
    assert result["scores"].tolist() == [1.0, 0.0]

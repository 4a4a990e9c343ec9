"""Rewards as exact numbers: thresholds as they are written, and rewards that differ only by rounding are equal."""

import itertools
import math
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.rewards import (
    as_fraction,
    as_range,
    exact_rewards,
    exact_sum,
    marks,
    measured_range,
    same_reward,
    without_rounding,
)

BELOW_1 = 0.99999994  # the float32 before 1


class TestAsFraction:
    @pytest.mark.parametrize(
        ("value", "expected"), [(" 4/8 ", F(1, 2)), ("0.1", F(1, 10)), (0.1, F(1, 10)), (0, F(0)), (F(2, 3), F(2, 3))]
    )
    def test_exact_value_as_written(self, value, expected):
        assert as_fraction(value) == expected

    @pytest.mark.parametrize("value", ["", "one half", "1/0", "nan", math.inf, None])
    def test_what_is_no_number_is_named_in_the_error(self, value):
        with pytest.raises(ValueError, match=r"is not a number or a fraction such as 1/8") as error:
            as_fraction(value)
        assert repr(value) in str(error.value)


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=400))
def test_a_measured_range_is_what_numpy_says(rewards):
    low, high = np.percentile(rewards, [1, 99], method="inverted_cdf")
    if same_reward(low, high):
        with pytest.raises(ValueError, match=f"percentile of {len(rewards)} rewards are both"):
            measured_range(rewards)
    else:
        assert tuple(np.float32(float(end)) for end in measured_range(rewards)) == (low, high)


@given(st.lists(st.fractions(), max_size=12))
def test_the_exact_sum_is_what_adding_one_by_one_gives(numbers):
    assert exact_sum(numbers) == sum(numbers, F(0))
    assert type(exact_sum(numbers)) is F


@pytest.mark.parametrize("given", [(1, 0), ("1", "1"), ("0", "x"), (0,), (0, 1, 2), None])
def test_a_range_is_two_numbers_in_order(given):
    assert as_range(("-1/3", 0.1)) == (F(-1, 3), F(1, 10))
    with pytest.raises(ValueError, match="two numbers LOW HIGH, LOW below HIGH"):
        as_range(given)


def neighbour(reward: float, steps: int) -> float:
    """The float32 so many representable numbers away."""
    result = np.float32(reward)
    for _ in range(abs(steps)):
        result = np.nextafter(result, np.float32(math.inf if steps > 0 else -math.inf))
    return float(result)


def step_at(reward: float) -> F:
    """The distance of neighbours in float32 at this size: 2^(e - 23) for a number in [2^e, 2^(e + 1))."""
    return F(2) ** (math.frexp(np.float32(reward))[1] - 24)


REWARDS = st.floats(2**-40, 2**40, width=32).flatmap(lambda value: st.sampled_from([value, -value]))


@given(reward=REWARDS, steps=st.integers(-40, 40), size=st.sampled_from([2**-40, 0.7, 1.0, 100.0]))
@example(reward=1.0, steps=-8, size=1.0)  # below a power of two the steps are half as long
@example(reward=1.0, steps=-9, size=1.0)
@example(reward=1.9, steps=5, size=1.0)
def test_rewards_are_the_same_if_they_are_four_steps_apart_at_most(reward, steps, size):
    """The steps are those at the size of the larger reward, or of the parts that they are sums of."""
    other = neighbour(reward, steps)
    step = step_at(max(abs(reward), abs(other), size))
    assert same_reward(reward, other, size) is (abs(F(reward) - F(other)) <= 4 * step)
    assert same_reward(other, reward, size) is same_reward(reward, other, size)


@pytest.mark.parametrize("high", [1.0, 64.0])
@pytest.mark.parametrize("kind", [float, np.float32])
def test_parts_that_cancel_are_no_signal(high, kind):
    """In floating-point numbers, 0.3 - 0.1 - 0.2 is not 0."""
    parts = [kind(high * part) for part in (0.3, -0.1, -0.2)]
    sums = {float(sum(order, kind(0))) for order in itertools.permutations(parts)}
    assert len(sums | {0.0}) > 1, "otherwise this tests nothing"
    assert {*without_rounding([*sums, 0.0], (0.0, high))} == {0.0}
    assert exact_rewards([*sums, high], (F(0), F(high)))[-1] == 1 and {*exact_rewards(sums, (F(0), F(high)))} == {0}
    assert len({*without_rounding([0.0, 1e-4 * high], (0.0, high))}) == 2


@given(start=REWARDS, steps=st.lists(st.integers(0, 30), min_size=1, max_size=6), data=st.data())
def test_all_are_equal_if_and_only_if_the_greatest_is_the_same_as_the_least(start, steps, data):
    rewards = [neighbour(start, step) for step in steps]
    result = without_rounding(rewards)
    assert (len(set(result)) == 1) is same_reward(min(rewards), max(rewards))
    assert set(result) <= {*rewards, 0.0, 1.0}
    assert all(same_reward(old, new) for old, new in zip(rewards, result, strict=True))
    order = data.draw(st.permutations(range(len(rewards))))  # the order of the responses does not matter
    assert without_rounding([rewards[place] for place in order]) == tuple(result[place] for place in order)


@pytest.mark.parametrize(("rewards", "equal"), [
    ((1.0, BELOW_1, 1.0, BELOW_1), 1.0),
    ((0.1 + 0.2, 0.3, 0.3), 0.3),
    ((float(np.sum(np.float32([0.7, 0.2, 0.1]))), float(np.float32(0.9) + np.float32(0.1))), 1.0),
    ((100.00001, 100.0), 100.0),
])  # fmt: skip
def test_rewards_that_are_the_same_become_the_shortest(rewards, equal):
    assert without_rounding(rewards) == (equal,) * len(rewards)


@pytest.mark.parametrize("rewards", [(0.0, 1e-6), (1.0, 0.999999), (0.5, 0.50001), (1e300, 2e300), (0.0, 1.0), ()])
def test_rewards_that_differ_stay_as_they_are(rewards):
    assert without_rounding(rewards, (0.0, 1.0)) == rewards


def test_an_end_is_taken_by_one_set_only():
    """4 short steps below 1 and 3 long ones above it are 5 long steps apart, so they are two rewards."""
    low, high = neighbour(1.0, -4), neighbour(1.0, 3)
    assert without_rounding([low, high], (0.0, 1.0)) == (1.0, high)
    assert without_rounding([low], (0.0, 1.0)) == (1.0,)


@pytest.mark.parametrize("high", ["1/3", "0.7", "100", "3/7"])
def test_full_marks_are_exactly_1_also_after_a_conversion_to_float32(high):
    full = float(F(high))
    for reward in (full, float(np.float32(full)), neighbour(full, -1), neighbour(full, 2)):
        assert exact_rewards([reward, 0.0], (F(0), F(high))) == (1, 0)
        assert marks(np.array([[reward, 0.0]]), (F(0), F(high))).tolist() == [[1.0, 0.0]]


@given(st.lists(st.sampled_from([0, 1, 2, 3, 7, 10]), min_size=1, max_size=6), st.integers(1, 5))
def test_a_mark_is_the_share_of_the_way_through_the_range(rewards, low):
    expected = [(reward + low) / (10 + low) for reward in rewards]
    np.testing.assert_allclose(marks(np.array(rewards), (F(-low), F(10))), expected, rtol=1e-15)

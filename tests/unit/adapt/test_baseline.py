"""The choice between the critic's values and a mean as the baseline, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.baseline import critic_leaves_less, explained_variance

NUMBERS = st.integers(-8, 8).map(lambda number: number / 4)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=12)


def variance(numbers) -> Fraction:
    exact = [*map(Fraction, numbers)]
    mean = sum(exact, Fraction(0)) / len(exact)
    return sum(((number - mean) ** 2 for number in exact), Fraction(0)) / len(exact)


@given(tokens=TOKENS)
def test_the_critic_is_taken_if_it_leaves_less_variance(tokens):
    returns, values, other = (np.array(column) for column in (zip(*tokens, strict=True) if tokens else ((), (), ())))
    if not tokens:
        assert not critic_leaves_less(returns, values, returns - other) and explained_variance(returns, values) is None
        return
    left, otherwise, spread = variance(returns - values), variance(returns - other), variance(returns)
    if left != otherwise:  # equal ones may differ by rounding
        assert critic_leaves_less(returns, values, returns - other) == (left < otherwise)
    explained = explained_variance(returns, values)
    assert (explained is None) == (spread == 0)
    if explained is not None:
        assert explained == pytest.approx(float(1 - left / spread), abs=1e-12)
        if left != spread:  # with one mean for all tokens, it is EVPO's rule
            assert critic_leaves_less(returns, values, returns - 0.75) == (explained > 0)

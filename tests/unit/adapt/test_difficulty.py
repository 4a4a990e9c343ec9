"""Counts by prompt against a dictionary."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.difficulty import SuccessCounts
from bapo_openrlhf.adapt.group import Prompt

PROMPTS = [Prompt(f"problem {number}") for number in range(12)]
one_group = st.tuples(st.integers(0, 9), st.integers(0, 4))  # prompt, right ones of four; two prompts never come


@given(steps=st.lists(st.lists(one_group, max_size=6), max_size=6), decay=st.sampled_from([0.0, 0.5, 1.0]))
def test_counts_are_those_of_a_dictionary(make_group, steps, decay):
    counts, expected = SuccessCounts(decay, 1.0, 2.0), {}
    for step in steps:
        counts.update([make_group(right, size=4, prompt=PROMPTS[number]) for number, right in step])
        for number, right in step:
            a, b = expected.get(number, (Fraction(1), Fraction(2)))
            rest = 1 - Fraction(decay)
            expected[number] = (Fraction(decay) * a + rest + right, Fraction(decay) * b + 2 * rest + 4 - right)
        actual, known = counts.counts_of(PROMPTS)
        assert known.tolist() == [number in expected for number in range(len(PROMPTS))]
        wanted = [[float(count) for count in expected.get(number, (1, 2))] for number in range(len(PROMPTS))]
        assert actual == pytest.approx(np.array(wanted), rel=1e-6)
    assert len(counts) == len(expected)

"""Masks and vetoes against their definitions, LUFFY's shaping, VCPO's factor in exact arithmetic, the gate on reuse."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.corrections import GAMMA, ReuseGate, learning_rate_factor, second_moment_mask, shaped, vetoed

numbers = st.floats(-3, 3, allow_nan=False).map(lambda value: round(value, 3))
# An energy, and which use of its batch the optimizer step belongs to. Steps of 1/8 are exact in floating point.
streams = st.lists(st.tuples(st.integers(0, 40).map(lambda k: k / 8), st.integers(1, 4)), max_size=40)


def by_removal(log_ratios, advantages, limit):
    """Take the token with the largest square away until the mean of the others is small enough; exact fractions."""
    squares = {n: Fraction(str(r)) ** 2 for n, r in enumerate(log_ratios) if r * a_sign(advantages[n]) > 0}
    while squares and sum(squares.values()) > limit * len(squares):
        del squares[max(squares, key=lambda n: (squares[n], n))]
    gone = {n for n, r in enumerate(log_ratios) if r * a_sign(advantages[n]) > 0} - squares.keys()
    return [n not in gone for n in range(len(log_ratios))]


def a_sign(advantage):
    return (advantage > 0) - (advantage < 0)


@settings(max_examples=3 * settings.default.max_examples)
@given(
    st.lists(st.tuples(numbers, numbers), max_size=25),
    st.sampled_from([1.0000037e-6, 0.0400000037, 0.5000000037, 3.0000000037]),
)
def test_mask_is_the_definition(tokens, limit):
    """No mean of these squares equals a limit, because rounding would decide then."""
    log_ratios, advantages = ([pair[i] for pair in tokens] for i in range(2))
    result = second_moment_mask(np.array(log_ratios), np.array(advantages), limit)
    assert result.dtype == bool and result.tolist() == by_removal(log_ratios, advantages, Fraction(str(limit)))


def test_a_token_of_small_advantage_counts_as_any_other():
    """The product of a small log-ratio and a tiny advantage is 0 in floating point, and its sign is not."""
    assert second_moment_mask(np.array([0.5]), np.array([5e-324]), 0.04).tolist() == [False]


def test_a_limit_that_is_reached_leaves_nothing_out():
    log_ratios = np.array([0.5, 1.0, 0.5])
    assert second_moment_mask(log_ratios, np.ones(3), 0.5).all()  # (1/4 + 1 + 1/4) / 3
    assert second_moment_mask(log_ratios, np.ones(3), 0.49).tolist() == [True, False, True]


@settings(max_examples=3 * settings.default.max_examples)
@given(
    st.lists(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=9, max_size=9), max_size=4),
    st.sampled_from([1.0000037e-1, 0.5000000037, 0.9000000037]),
)
def test_veto_is_its_definition(responses, limit):
    """One pass over each response. No ratio equals a limit, because rounding would decide then."""
    expected = []
    for response in responses:
        tripped, leaves = False, []
        for log_ratio, advantage, generated in response:
            counts = generated and advantage < 0
            leaves.append(counts and tripped)
            tripped = tripped or (counts and math.exp(log_ratio) < limit)
        expected.append(leaves)
    log_ratios, advantages, generated = (
        np.array([[token[i] for token in response] for response in responses]).reshape(len(responses), 9)
        for i in range(3)
    )
    assert vetoed(log_ratios, advantages, generated.astype(bool), limit).tolist() == expected


def test_the_shaping_of_luffy_by_hand():
    assert GAMMA == 0.1
    assert shaped(0.1) == pytest.approx(1 / 2) and shaped(0.9) == pytest.approx(0.9) and shaped(0.0) == 0


@pytest.mark.parametrize(("weights", "full", "share"), [
    ([7], 1, 1),
    ([1, 3], 2, Fraction(16, 20)),
    ([1, 1, 1, 5], 16, Fraction(64, 448)),  # four of sixteen responses
])  # fmt: skip
def test_factor_is_the_root_of_kishs_sample_size_as_a_share_of_a_full_batch(weights, full, share):
    result = learning_rate_factor(np.log(np.array(weights, dtype=float)), full)
    assert result == pytest.approx(math.sqrt(share), rel=1e-12)


def by_the_equations(stream, tau, window):
    """Which steps trip: z = (d - mean) / std of the last increments is above tau, written out over the whole past."""
    made, tripped = [], []
    for energy, use in stream:
        past = np.diff(made)[-window:]
        trips = False
        if made and use >= 2 and len(past) == window:
            rise, spread = energy - made[-1] - past.mean(), np.sqrt(((past - past.mean()) ** 2).mean())
            trips = bool(rise / spread > tau) if spread > 0 else bool(rise > 0)
        tripped.append(trips)
        if not trips:
            made.append(energy)
    return tripped


@pytest.mark.parametrize(("tau", "window"), [(0.0, 8), (0.5123457, 2), (1.0123457, 4)])
def test_it_trips_by_the_equations(tau, window):
    rng = np.random.default_rng(7)
    energies, uses = rng.integers(0, 41, 1000) / 8, rng.integers(1, 5, 1000)
    stream = list(zip(energies.tolist(), uses.tolist(), strict=True))
    gate, expected = ReuseGate(tau, window), by_the_equations(stream, tau, window)
    assert [gate.trips(energy, use) for energy, use in stream] == expected
    assert 50 < sum(expected) < 700


@given(streams, streams)
def test_a_restored_gate_goes_on_as_the_saved_one(before, after):
    gate, restored = ReuseGate(0.5123457, 4), ReuseGate(0.5123457, 4)
    for energy, use in before:
        gate.trips(energy, use)
    restored.load_state_dict(gate.state_dict())
    assert [restored.trips(*step) for step in after] == [gate.trips(*step) for step in after]

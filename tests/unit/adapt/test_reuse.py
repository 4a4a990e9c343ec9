"""The gate on reuse against its equations, on random streams of energies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.reuse import ReuseGate

# An energy, and which use of its batch the optimizer step belongs to. Steps of 1/8 are exact in floating point.
streams = st.lists(st.tuples(st.integers(0, 40).map(lambda k: k / 8), st.integers(1, 4)), max_size=40)


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


@pytest.mark.parametrize("window", [2, 4, 8])
@pytest.mark.parametrize("tau", [0.0, 0.1234567, 0.5123457, 1.0123457])
def test_it_trips_by_the_equations(tau, window):
    rng = np.random.default_rng(7)
    stream = [
        (k / 8, use)
        for k, use in zip(rng.integers(0, 41, 1000).tolist(), rng.integers(1, 5, 1000).tolist(), strict=True)
    ]
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


@pytest.mark.parametrize(("use", "expected"), [(1, False), (2, True)])
def test_the_first_use_never_trips(use, expected):
    gate = ReuseGate(0.5, 2)
    assert [gate.trips(energy, 1) for energy in (1.0, 2.0, 3.0, 100.0)] == [False] * 4
    assert gate.trips(1000.0, use) is expected

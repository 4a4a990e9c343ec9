"""The ledger: every generated group ends in exactly one counted state."""

from __future__ import annotations

import pytest

from bapo_openrlhf.adapt.ledger import FRESH_STATES, REEVALUATED_STATES, Ledger


def test_states_are_those_of_the_design():
    assert set(FRESH_STATES) == {"fresh", "filtered", "cut_fresh"}
    assert set(REEVALUATED_STATES) == {"reevaluated", "unimproved", "solved", "cut_reevaluated"}


def test_counts_add_up_over_steps():
    ledger = Ledger()
    ledger.record(generated_fresh=6, fresh=3, filtered=2, cut_fresh=1)
    ledger.record(generated_fresh=1, fresh=1)
    ledger.record(generated_reevaluated=10, reevaluated=4, unimproved=3, solved=2, cut_reevaluated=1)
    assert ledger.counts["generated_fresh"] == 7
    assert [ledger.counts[state] for state in FRESH_STATES] == [4, 2, 1]
    assert ledger.counts["generated_reevaluated"] == 10
    assert [ledger.counts[state] for state in REEVALUATED_STATES] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    "counts",
    [
        {"generated_fresh": 1},
        {"fresh": 1},
        {"generated_fresh": 2, "fresh": 1, "filtered": 2},
        {"generated_fresh": 3, "fresh": 1, "filtered": 1},
        {"generated_fresh": 1, "reevaluated": 1},  # a fresh group is no re-evaluated one
        {"generated_reevaluated": 1, "fresh": 1},
        {"generated_reevaluated": 1},
        {"solved": 1},
        {"generated_reevaluated": 2, "unimproved": 1, "solved": 2},
        {"generated_fresh": 1, "generated_reevaluated": 1, "fresh": 2},
        {"generated_fresh": 1, "lost": 1},
    ],
)
def test_what_does_not_balance_is_an_error(counts):
    ledger = Ledger()
    ledger.record(generated_fresh=2, fresh=1, filtered=1, generated_reevaluated=1, solved=1)
    with pytest.raises(RuntimeError, match="does not balance"):
        ledger.record(**counts)


@pytest.mark.parametrize("state", [*FRESH_STATES, *REEVALUATED_STATES])
def test_every_state_counts_once(state):
    generated = "generated_fresh" if state in FRESH_STATES else "generated_reevaluated"
    ledger = Ledger()
    ledger.record(**{generated: 3, state: 3})
    with pytest.raises(RuntimeError, match=generated):
        ledger.record(**{state: 1})


def test_state_round_trip():
    ledger, again = Ledger(), Ledger()
    ledger.record(generated_fresh=2, fresh=1, filtered=1)
    state = ledger.state_dict()
    again.record(generated_reevaluated=9, solved=9)  # forgotten by the load
    again.load_state_dict(state)
    ledger.record(generated_fresh=1, fresh=1)
    assert state == {"generated_fresh": 2, "fresh": 1, "filtered": 1}  # a snapshot, not a view
    again.record(generated_fresh=1, fresh=1)
    assert again.state_dict() == ledger.state_dict()


def test_a_broken_state_is_an_error():
    with pytest.raises(RuntimeError, match="generated_fresh"):
        Ledger().load_state_dict({"generated_fresh": 2, "fresh": 1})

"""Signals that the driver of a run gets, for real."""

import re
import signal
from pathlib import Path

import pytest

from bapo_openrlhf.errors import Ended
from bapo_openrlhf.training.driver.signals import SAME, Signals, caught
from bapo_openrlhf.training.wire.signals import NUMBERS


@pytest.fixture
def handlers():
    """The handlers are the same after the test."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield before
    assert {number: signal.getsignal(number) for number in NUMBERS} == before


@pytest.mark.parametrize("number", NUMBERS)
def test_before_the_first_step_a_signal_ends_the_block(handlers, number):
    with pytest.raises(Ended) as ended, caught():
        signal.raise_signal(number)
        pytest.fail("it went on")
    assert (ended.value.how, ended.value.code) == ("stopped", 128 + number)
    assert ended.value.text == f"stopped by {signal.Signals(number).name} before the first step"
    assert not isinstance(ended.value, Exception)  # nobody catches it on its way


@pytest.mark.parametrize("number", NUMBERS)
def test_later_it_is_noted(handlers, number):
    with caught() as received:
        received.waits = True
        signal.raise_signal(number)
        assert received.first == number and not received.again


def test_while_the_process_ends_further_signals_change_nothing(handlers):
    with pytest.raises(Ended, match=str(128 + signal.SIGTERM)), caught():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)


def test_a_second_signal_counts_if_it_comes_later():
    now = 100.0
    received = Signals(lambda: now)
    received.waits = True
    received(signal.SIGUSR1)
    now += SAME
    received(signal.SIGTERM)
    assert (received.first, received.since, received.again) == (signal.SIGUSR1, 100.0, False)
    now += 0.1
    received(signal.SIGTERM)
    assert (received.first, received.since, received.again) == (signal.SIGUSR1, 100.0, True)


def test_what_a_background_job_ignores_is_ignored(handlers):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with caught() as received:
            signal.raise_signal(signal.SIGINT)
        assert received.first is None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_taken_away_comes_back(handlers):
    with caught() as received:
        signal.signal(signal.SIGTERM, lambda *_: pytest.fail("Ray's handler"))
        received.listen()
        received.waits = True
        signal.raise_signal(signal.SIGTERM)
        assert received.first == signal.SIGTERM


@pytest.mark.parametrize(("code", "kind"), [(int(signal.SIGTERM), Ended), (1, SystemExit), (None, SystemExit)])
def test_rays_own_handler_exits_with_the_number_of_the_signal(handlers, code, kind):
    with pytest.raises(SystemExit) as ended, caught():
        raise SystemExit(code)
    assert type(ended.value) is kind
    assert ended.value.code == (128 + signal.SIGTERM if kind is Ended else code)


def test_the_signals_are_those_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "reliability.md").read_text().split("## Signals")[1].split(" lets ")[0]
    assert [number.name for number in NUMBERS] == re.findall(r"SIG\w+", page)

"""Signals that the driver gets.

Before the first step, a signal ends the run where it is. Later the first signal is only noted, and the driver passes it
on (`waiting.py`).
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bapo_openrlhf.errors import Ended
from bapo_openrlhf.training.wire.signals import NUMBERS

SAME = 1.0  # seconds in which a second signal is the first one: `timeout` sends it to a process and to its group
BEFORE = "before the first step"


class Signals:
    """The first signal that the driver got, when it came, and whether another came `again`.

    If `waits` is set, the first signal is only noted, because the step is to end first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, when: str = BEFORE) -> None:
        self._clock, self._when = clock, when
        self.first: signal.Signals | None = None
        self.since, self.again, self.waits = 0.0, False, False

    def __call__(self, number: int, _frame: Any = None) -> None:
        """Note a signal. It is the handler, and raises Ended for the first one if that does not wait."""
        now = self._clock()
        if self.first is not None:
            self.again = self.again or now - self.since > SAME
            return
        self.first, self.since = signal.Signals(number), now
        if not self.waits:
            raise self.ended(self._when)

    def listen(self) -> None:
        """Become the handler of the signals that are not ignored. Ray takes SIGTERM for itself when it starts."""
        for number in NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT is in a background job of a shell
                signal.signal(number, self)

    def ended(self, when: str) -> Ended:
        """What ends the run that the first signal stopped."""
        assert self.first is not None  # otherwise nothing stopped it
        return Ended("stopped", 128 + self.first, f"stopped by {self.first.name} {when}")

    @contextmanager
    def exits(self) -> Iterator[None]:
        """A block in which Ray may start: its own handler of SIGTERM exits, and this raises Ended in its place."""
        try:
            yield
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            self.first = signal.SIGTERM
            raise self.ended(self._when) from None


@contextmanager
def caught(when: str = BEFORE) -> Iterator[Signals]:
    """Note the signals in the block. If one ends it, `when` is said after its name."""
    signals, before = Signals(when=when), {number: signal.getsignal(number) for number in NUMBERS}
    signals.listen()
    try:
        with signals.exits():
            yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

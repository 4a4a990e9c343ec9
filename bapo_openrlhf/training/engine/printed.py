"""What a process of the user's code prints: passed on to standard error, but not without limit.

A function that prints thousands of lines in each call would otherwise fill the log of a run with gigabytes.
"""

import os
import select
from typing import Any

MOST = 4096  # bytes of a call that are passed on


def left_out(whose: str, count: int) -> str:
    """What is said of so many bytes."""
    return f"\n{whose}: {count:,} bytes that its code printed are left out; the first {MOST:,} of a call are shown\n"


class Printed:
    """A pipe for the standard output and standard error of a process. Close `writer` here once the process has it."""

    def __init__(self, whose: str) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._whose, self._open = whose, True
        self._allowance, self._excess = MOST, 0  # bytes

    def begin(self, calls: int) -> None:
        """Allow MOST bytes for each of the calls that begin now. What comes between calls counts too."""
        self._pass_on()
        self._allowance = MOST * calls

    def wait_for(self, channel: Any, seconds: float) -> bool:
        """Pass on what is printed until a socket or a pipe can be read, or until some was printed; whether it can."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        if self._open:
            poll.register(self._reader, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(1000 * seconds, 0))}
        if self._reader in ready:
            self._pass_on()
        return channel.fileno() in ready

    def end(self) -> None:
        """Pass on the rest, and say how much was left out."""
        self._pass_on()
        if self._excess:
            os.write(2, left_out(self._whose, self._excess).encode())
            self._excess = 0

    def close(self) -> None:
        """Close this end."""
        self._open = False
        os.close(self._reader)

    def _pass_on(self) -> None:
        """Pass on what there is now, as far as it is allowed."""
        while self._open:
            try:
                data = os.read(self._reader, 65536)
            except BlockingIOError:
                return
            self._open = bool(data)  # otherwise the process has closed its end
            piece = data[: self._allowance]
            self._allowance -= len(piece)
            self._excess += len(data) - len(piece)
            while piece:
                piece = piece[os.write(2, piece) :]

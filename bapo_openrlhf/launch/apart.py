"""The user's code in a process of its own: if it ends its process, as a segmentation fault does, this one goes on."""

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.training.engine.printed import Printed
from bapo_openrlhf.training.engine.reward_pool import status
from bapo_openrlhf.training.engine.reward_worker import die_with

LOOK = 3600.0  # seconds that one wait takes at most
Begins = Callable[[str], None]
Call = Callable[[Begins], list[str]]


class Lost(Exception):
    """The process gave no answer. `place` is where the user's function begins; None if it was not called yet."""

    def __init__(self, what: str, place: str | None) -> None:
        super().__init__(what)
        self.place = place


def apart(call: Call, whose: str, *, loading: float | None, calling: float | None) -> list[str]:
    """What a call returns in a child of this process. The child begins with all that is loaded here.

    What the child prints is cut as in a run, also if a program or a library in C prints it.

    Args:
        call: It says where the user's function begins, by its argument, before it calls that.
        whose: The user's file.
        loading, calling: Seconds that may pass before it says so, and from then on; None sets no limit.

    Raises:
        ConfigError: The call raised it.
        Lost: The child took too long and was killed, or it ended.
    """
    fork = get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    prints = Printed(whose)
    child = fork.Process(target=_answer, args=(call, sender, prints.writer, os.getpid()))
    child.start()
    sender.close()
    os.close(prints.writer)
    prints.begin(1)
    place, limit = None, loading
    try:
        while in_time := _comes(receiver, prints, limit):
            kind, answer = receiver.recv()
            if kind == "returned":
                return list(answer)
            if kind == "refused":
                raise ConfigError(answer)
            place, limit = answer, calling
    except EOFError:
        pass
    finally:
        child.kill()
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # what it has started
        child.join()
        receiver.close()
        prints.end()
        prints.close()
    if not in_time:
        raise Lost(f"took more than {limit:g} s (verifier.timeout)", place)
    raise Lost(f"ended its process ({status(child.exitcode or 0)})", place)


def _comes(receiver: Connection, prints: Printed, seconds: float | None) -> bool:
    """Pass on what the child prints until it says something else. Returns whether that comes in time."""
    deadline = time.monotonic() + (math.inf if seconds is None else seconds)
    while (left := deadline - time.monotonic()) > 0:
        if prints.wait_for(receiver, min(left, LOOK)):
            return True
    return False


def _answer(call: Call, sender: Connection, printed: int, parent: int) -> None:
    """What the child does."""
    os.setsid()
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # because a child waits for ever for the threads of its parent
    for number in (1, 2):
        os.dup2(printed, number)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    try:
        result = call(lambda place: sender.send(("begins", place)))
        sys.stdout.flush()  # because this process is killed
        sender.send(("returned", result))
    except ConfigError as error:
        sys.stdout.flush()
        sender.send(("refused", str(error)))

"""The user's code in a process of its own: if it ends its process, as a segmentation fault does, this one goes on."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.training.engine.reward_pool import status
from bapo_openrlhf.training.engine.reward_worker import die_with

Begins = Callable[[str], None]
Call = Callable[[Begins], list[str]]


class Lost(Exception):
    """The process gave no answer. `place` is where the user's function begins; None if it was not called yet."""

    def __init__(self, what: str, place: str | None) -> None:
        super().__init__(what)
        self.place = place


def apart(call: Call, seconds: float | None = None) -> list[str]:
    """What a call returns in a child of this process. The child begins with all that is loaded here.

    Args:
        call: It says where the user's function begins, by its argument, before it calls that.
        seconds: How long it may take from then on.

    Raises:
        ConfigError: The call raised it.
        Lost: The child took too long and was killed, or it ended.
    """
    fork = get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(call, sender, os.getpid()))
    child.start()
    sender.close()
    place = limit = None
    try:
        while in_time := receiver.poll(limit):
            kind, answer = receiver.recv()
            if kind == "returned":
                return list(answer)
            if kind == "refused":
                raise ConfigError(answer)
            place, limit = answer, seconds
    except EOFError:
        pass
    finally:
        child.kill()
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # what it has started
        child.join()
        receiver.close()
    if not in_time:
        raise Lost(f"took more than {seconds:g} s (verifier.timeout)", place)
    raise Lost(f"ended its process ({status(child.exitcode or 0)})", place)


def _answer(call: Call, sender: Connection, parent: int) -> None:
    """What the child does."""
    os.setsid()
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # because a child waits for ever for the threads of its parent
    try:
        result = call(lambda place: sender.send(("begins", place)))
        sys.stdout.flush()  # because this process is killed
        sender.send(("returned", result))
    except ConfigError as error:
        sender.send(("refused", str(error)))

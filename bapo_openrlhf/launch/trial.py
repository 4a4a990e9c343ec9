"""What the user wrote, tried in a process of its own: if it ends its process or never ends, this one goes on."""

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.training.engine.reward_pool import LOADING, Printed, status
from bapo_openrlhf.training.engine.reward_worker import die_with
from bapo_openrlhf.user_file import described

LOOK = 3600.0  # seconds that one wait takes at most
Begins = Callable[[str], None]
Call = Callable[[Begins], list[str]]


@dataclass(frozen=True)
class Trial:
    """How a file of the user's is tried, in the words of an error."""

    # The flag that names the file, and the file.
    flag: str
    file: str
    what: str  # what of the file is called
    how: str  # how it is called
    # Seconds of `verifier.timeout`, which each call may take, while loading has LOADING; None sets no limit for either.
    seconds: float | None = None

    def error(self, says: str, place: str = "") -> ConfigError:
        """An error in the call. The place is where the user's function begins; empty if it is not known."""
        where = f" ({place})" if place else ""
        return ConfigError(f"{self.flag} {self.file}: {self.what} {says}, {self.how}{where}")

    def run(self, call: Call) -> list[str]:
        """What a call returns in a child of this process. The child begins with all that is loaded here.

        What the child prints is cut as in a run, also if a program or a library in C prints it. The call says where the
        user's function begins, by its argument, before each time that it calls that.

        Raises:
            ConfigError: The call raised an error, ended its process, or took too long and was killed.
        """
        fork = get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        prints = Printed(self.file)
        child = fork.Process(target=self._answer, args=(call, sender, prints.writer, os.getpid()))
        child.start()
        sender.close()
        os.close(prints.writer)
        prints.begin(1)
        place, limit, in_time = None, self.seconds and LOADING, True
        try:
            while in_time := _comes(receiver, prints, limit):
                kind, answer = receiver.recv()
                if kind == "returned":
                    return list(answer)
                if kind == "refused":
                    raise ConfigError(answer)
                place, limit = answer, self.seconds
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
        reason = f"took more than {limit:g} s" if not in_time else f"ended its process ({status(child.exitcode or 0)})"
        if place is None:
            raise ConfigError(f"{self.flag} {self.file}: loading it {reason}")
        raise self.error(reason if in_time else f"{reason} (verifier.timeout)", place)

    def _answer(self, call: Call, sender: Connection, printed: int, parent: int) -> None:
        os.setsid()
        die_with(parent)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # because a child waits for ever for the threads of its parent
        for number in (1, 2):
            os.dup2(printed, number)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        message: tuple[str, str | list[str]]
        try:
            message = ("returned", call(lambda place: sender.send(("begins", place))))
        except ConfigError as error:
            message = ("refused", str(error))
        except (Exception, SystemExit) as error:
            message = ("refused", str(self.error(f"raised {described(error)}")))
        sys.stdout.flush()  # because this process is killed
        sender.send(message)


def _comes(receiver: Connection, prints: Printed, seconds: float | None) -> bool:
    """Pass on what the child prints until it says something else. Returns whether that comes in time."""
    deadline = time.monotonic() + (math.inf if seconds is None else seconds)
    while (remaining := deadline - time.monotonic()) > 0:
        if prints.wait_for(receiver, min(remaining, LOOK)):
            return True
    return False

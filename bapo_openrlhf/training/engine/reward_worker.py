"""One process of a RewardPool. It loads a reward file, and then answers one request after another.

    python reward_worker.py REWARD_FILE MEMORY_BYTES PARENT_PID SOCKET_FD

Requests and replies are lines of JSON on a separate socket. So nothing that the reward file prints gets between them,
and nothing is ever unpickled.

    first request   [0, the parent's sys.path]                       reply ["result", FILE:LINE of reward_func, 0]
    then            [number, [queries, prompts, labels, responses]]  reply ["result", {"rewards": ..., ...}, number]
    a failure       reply [kind, [what happened, FILE:LINE], number], with kind "raised", "invalid" or "memory"

A request may come before the last one is answered, so the number says to which one a reply belongs; that of "memory" is
null, because this process then ends. The function is called in the main thread, where a verifier may use signal.alarm.
This file imports only the standard library, and three small files of this package, so that a process without torch
starts in less than a tenth of a second. It needs Linux.
"""

import ctypes
import inspect
import json
import math
import numbers
import os
import reprlib
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_NAME = "responses"


class Invalid(ValueError):
    """A function of the user returned what it must not return. `place` is FILE:LINE of the function if it is known."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


def call(
    function: Callable[..., Any], queries: list[str], prompts: list[str], labels: list[Any], responses: list[str]
) -> Any:
    """What a reward function returns. It gets the keyword `responses` if it names it or takes any keyword."""
    keywords = _keywords(function, follow_wrapped=False)
    arguments = {_NAME: responses} if _NAME in keywords or inspect.Parameter.VAR_KEYWORD in keywords.values() else {}
    return function(queries, prompts, labels, **arguments)


def names_responses(function: Callable[..., Any]) -> bool:
    """Whether a reward function names the argument `responses`, so that it need not look for them in the queries."""
    return _NAME in _keywords(function)


def _keywords(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The kinds of the arguments that may be given by their names; none if that is not known, as of a function of C."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    try:
        parameters = inspect.signature(function, **options).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {parameter.name: parameter.kind for parameter in parameters if parameter.kind not in kinds}


def encode(message: Any) -> bytes:
    """The message as one line. A lone surrogate becomes three bytes, which `json.loads` reads back."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def checked(result: Any) -> dict[str, Any]:
    """What the function returned for its one response, as plain numbers. Without scores, they are the rewards.

    Raises:
        Invalid: A reward or score is not one finite number, or see `logged`. The message names it.
    """
    if inspect.isawaitable(result):
        raise Invalid(f"returned {short_repr(result)}; it must not be async")
    if not isinstance(result, Mapping) or "rewards" not in result:
        kind = "" if isinstance(result, Mapping) else f", a {type(result).__name__}"
        raise Invalid(
            f'returned {short_repr(result)}{kind}; it must be a dict with rewards, as in {{"rewards": [1.0]}}'
        )
    rewards, scores = result["rewards"], result.get("scores")
    return {
        "rewards": one_number("rewards", rewards, finite=True),
        "scores": one_number("scores", rewards if scores is None else scores, finite=True),
        "extra_logs": logged(result.get("extra_logs")),
    }


def logged(logs: Any) -> dict[str, float]:
    """The numbers that are logged of one response, by name. NaN means that there is none of this name.

    Raises:
        Invalid: It is not a dict, a value is not one number, or a name is in `failures.OWN`. The message names it.
    """
    from bapo_openrlhf.training.wire.failures import OWN

    logs = {} if logs is None else logs
    if not isinstance(logs, Mapping):
        raise Invalid(f"returned extra_logs = {short_repr(logs)}; it must be a dict of numbers")
    for key in logs:
        if str(key) in OWN:
            raise Invalid(
                f"returned extra_logs[{key!r}], a name that the run itself uses; allowed is each name but "
                f"{', '.join(sorted(OWN))}"
            )
    return {str(key): one_number(f"extra_logs[{key!r}]", value) for key, value in logs.items()}


def one_number(name: str, raw: Any, *, finite: bool = False) -> float:
    """A number that was returned for one response, as a tensor, array, list or number with one element.

    Raises:
        Invalid: It is not one number, or not a finite one. The message names it.
    """
    value = raw
    while True:
        if hasattr(value, "tolist"):  # a tensor, an array or one of their scalars
            value = value.tolist()
        elif isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        else:
            break
    try:
        number = float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        number = math.inf
    if number is None or (finite and not math.isfinite(number)):
        requirement = "one finite number" if finite else "one number"
        raise Invalid(f"returned {name} = {short_repr(raw)} for one response; {requirement} is needed")
    return number


def short_repr(value: Any) -> str:
    """A value in a few characters."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def _described(error: BaseException) -> str:
    """The type and message of an error, then where it was raised, cut to a length that fits a log."""
    what = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):  # otherwise the line of the source comes first
        what = f"{type(error).__name__}: {error.msg}\n{what}"
    where = "".join(traceback.format_tb(error.__traceback__, limit=-4))
    return f"{what[:1000]}\n{where[-2000:]}".rstrip()


def failure(kind: str, what: str, number: int | None = None, place: str = "") -> bytes:
    """The reply that reports a failure. Its text can be printed."""
    return encode([kind, [text.encode("utf-8", "backslashreplace").decode() for text in (what, place)], number])


def answered(function: Callable[..., Any], request: bytes) -> bytes:
    """The reply to one request.

    Raises:
        MemoryError: There was not enough memory for the call, or for the message about its error.
    """
    number = int(request[1 : request.index(b",")])
    try:
        _, lists = json.loads(request)
        return encode(["result", checked(call(function, *lists)), number])
    except MemoryError:
        raise
    except Invalid as error:
        return failure("invalid", str(error), number, user_file().definition(function))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which end a call, not the process
        return failure("raised", f"raised {_described(error)}", number, user_file().place(error, function))


def user_file() -> ModuleType:
    """The module that loads files of the user. It can be imported once the process has the parent's sys.path."""
    from bapo_openrlhf import user_file

    return user_file


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the parent's thread that started it ends, even if Python hangs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(0)


def leave_signals() -> None:
    """Go on if a signal of `wire.signals` comes. It is not blocked, because what the function starts must end by it."""
    from bapo_openrlhf.training.wire.signals import NUMBERS

    def nothing(_number: int, _frame: Any) -> None:
        pass

    def in_fork() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is nothing:
                signal.signal(number, handler)
        unblock()

    block, unblock = (partial(signal.pthread_sigmask, how, NUMBERS) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
    handlers = {number: signal.signal(number, nothing) for number in NUMBERS}
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_fork)  # a signal waits for its handler
    unblock()


def limit_memory(extra: int) -> None:
    """Allow this process `extra` bytes in addition to what it has now. Asking for more raises MemoryError.

    RLIMIT_DATA counts private writable memory. RLIMIT_AS would also count mapped files, and the many GiB that CUDA and
    some allocators reserve and never touch.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        size = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = size + extra if hard == resource.RLIM_INFINITY else min(size + extra, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(path: str, memory: int, parent: int, socket: int) -> None:
    """Serve until the parent closes the socket."""
    die_with(parent)
    os.set_inheritable(socket, False)  # because a program that the function starts must not keep it open
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = os.fdopen(socket, "rb"), os.fdopen(socket, "wb", closefd=False)
    process = os.getpid()

    def reply(line: bytes) -> None:
        if os.getpid() != process:  # the function forked and the child returned, but only one process may answer
            os._exit(0)
        replies.write(line)
        replies.flush()

    out_of_memory = failure("memory", "ran out of memory")  # made while there is memory

    number, sys.path[:] = json.loads(requests.readline())
    leave_signals()
    try:
        function = user_file().execute(Path(path)).reward_func
    except BaseException as error:
        reply(failure("raised", f"raised {_described(error)}", number, user_file().place(error)))
        os._exit(1)
    limit_memory(memory)
    reply(encode(["result", user_file().definition(function), number]))

    while True:
        try:
            line = requests.readline()
            if not line:
                os._exit(0)  # at once, because threads that the file started could delay a normal exit
            answer = answered(function, line)
        except MemoryError:
            reply(out_of_memory)
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)  # otherwise an alarm of this call could go off in a later one
        reply(answer)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""One process of a RewardPool: loads a reward file, then answers one request after another.

    python worker.py REWARD_FILE MEMORY_BYTES PARENT_PID SOCKET_FD

Both directions are JSON, one text a line, on a socket of its own: nothing that the reward file prints gets in between,
and nothing is ever unpickled.

    first request   the parent's sys.path                     reply ["result", null] once the file is loaded
    then            [queries, prompts, labels, kwargs]        reply ["result", {"rewards": ..., ...}]
    a failure       reply [kind, what happened], with kind "raised", "invalid" or "memory"

The function is called in the main thread, where verifiers may use signal.alarm. Standard library only, so that a
process without torch starts in a few hundredths of a second. Linux only.
"""

import ctypes
import importlib.util
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
from typing import Any

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Invalid(ValueError):
    """The function returned something that is no reward."""


def encode(message: Any) -> bytes:
    """One line. Lone surrogates survive: each is three bytes of its own, and `json.loads` takes them back."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def checked(result: Any) -> dict[str, Any]:
    """What the function returned for its one response, as plain numbers.

    Args:
        result: "rewards", "scores" (the rewards where missing) and "extra_logs": tensors, arrays, lists or numbers, of
            one element each.

    Raises:
        Invalid: a reward or score is not one finite number, or a logged value not one number; names it.
    """
    if not isinstance(result, Mapping):
        raise Invalid(f"returned {_shown(result)}, a {type(result).__name__}; it must be a dict with rewards")
    rewards = result.get("rewards")
    scores = result.get("scores")
    logs = result.get("extra_logs")
    if logs is not None and not isinstance(logs, Mapping):
        raise Invalid(f"returned extra_logs = {_shown(logs)}; it must be a dict of numbers")
    return {
        "rewards": _number("rewards", rewards, finite=True),
        "scores": _number("scores", rewards if scores is None else scores, finite=True),
        # NaN may mean that there is nothing to log for this response.
        "extra_logs": {str(key): _number(f"extra_logs[{key!r}]", value) for key, value in (logs or {}).items()},
    }


def _number(name: str, given: Any, *, finite: bool = False) -> float:
    value = given
    while True:
        if hasattr(value, "tolist"):  # tensors, arrays and their scalars
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
        needed = "one finite number" if finite else "one number"
        raise Invalid(f"returned {name} = {_shown(given)} for one response; {needed} is needed")
    return number


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def _described(error: BaseException) -> str:
    """Type and message, then where it was raised; no longer than a log wants."""
    what = "".join(traceback.format_exception_only(error)).strip()
    where = "".join(traceback.format_tb(error.__traceback__, limit=-4))
    return f"{what[:1000]}\n{where[-2000:]}".rstrip()


def failure(kind: str, what: str) -> bytes:
    """The reply for a failure; the text can be printed."""
    return encode([kind, what.encode("utf-8", "backslashreplace").decode()])


def answered(function: Callable[..., Any], request: bytes) -> bytes:
    """The reply to one request.

    Raises:
        MemoryError: there was not enough for the call, or for saying what it raised.
    """
    try:
        queries, prompts, labels, kwargs = json.loads(request)
        return encode(["result", checked(function(queries, prompts, labels, **kwargs))])
    except MemoryError:
        raise
    except Invalid as error:
        return failure("invalid", str(error))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they end a call, not the process
        return failure("raised", f"raised {_described(error)}")


def load(path: str) -> Callable[..., Any]:
    """`reward_func` of a file, found the way OpenRLHF finds it."""
    spec = importlib.util.spec_from_file_location("reward_func", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


def die_with(parent: int) -> None:
    """Be killed when the parent's thread that started this process ends, even where no Python code runs any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before prctl
        os._exit(0)


def limit_memory(extra: int) -> None:
    """Let this process have `extra` bytes beyond what it has now; more is a MemoryError.

    RLIMIT_DATA counts private writable memory, which is what allocations take. RLIMIT_AS would count address space:
    mapped files too, and the ranges of many GiB that CUDA and some allocators reserve and never touch.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        now = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + extra if hard == resource.RLIM_INFINITY else min(now + extra, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(path: str, memory: int, parent: int, socket: int) -> None:
    """Serve until the parent closes the socket."""
    die_with(parent)
    os.set_inheritable(socket, False)  # a program that the function starts must not keep it open
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = os.fdopen(socket, "rb"), os.fdopen(socket, "wb", closefd=False)
    process = os.getpid()

    def reply(line: bytes) -> None:
        if os.getpid() != process:  # a fork that the function made and let return: only one may answer
            os._exit(0)
        replies.write(line)
        replies.flush()

    out_of_memory = failure("memory", "ran out of memory")  # made while there is some

    sys.path[:] = json.loads(requests.readline())
    try:
        function = load(path)
    except BaseException as error:
        reply(failure("raised", f"raised {_described(error)}"))
        os._exit(1)
    limit_memory(memory)
    reply(encode(["result", None]))

    while True:
        try:
            line = requests.readline()
            if not line:
                os._exit(0)  # at once: threads that the file started could keep a normal exit waiting
            answer = answered(function, line)
        except MemoryError:
            reply(out_of_memory)
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left on would go off in a later call
        reply(answer)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

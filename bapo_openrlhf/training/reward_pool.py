"""Calls a reward function in separate processes.

OpenRLHF calls `reward_func` in threads of its rollout engine. A thread cannot be stopped, an endless regular expression
holds the interpreter's lock, and a segmentation fault ends the engine. A process can be killed. So a call that hangs,
crashes or takes too much memory costs one reward and not the engine. The reward file stays as it is,
`reward_func(queries, prompts, labels, **kwargs)`.

This limits accidents and is not a sandbox: the function may do everything that the user may do. The memory limit holds
for each process separately. A program that the function starts is killed with it, unless it runs in a session of its
own or this process is itself killed from outside.
"""

import atexit
import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bapo_openrlhf.training.reward_worker import encode

MAX_REPLY = 2**20  # bytes; a reply is a few numbers, or an error of at most about 3,000 characters


class RewardFailure(Exception):
    """A reward function gave no reward for a response. The message says why, and names the file.

    `kind` is
        raised   The function raised an exception, or loading its file did.
        timeout  The function took longer than allowed, and its process was killed.
        crashed  The process of the function ended.
        memory   The function asked for more memory than allowed.
        invalid  The function did not return one finite number.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)  # both, because Ray pickles exceptions by their arguments
        self.kind = kind

    def __str__(self) -> str:
        return self.args[1]


class RewardPool:
    """Calls the `reward_func` of a file in up to `processes` processes, one response per call. It is thread-safe.

    A process is started when a call finds no free process. It serves one call after another. After a timeout, a crash
    or a memory error the next call gets a new process. `failures` counts failed calls by kind.

    Args:
        path: The reward file.
        processes: Number of calls that run at the same time; further calls wait.
        timeout: Seconds of wall-clock time that one call may take.
        memory_gib: GiB that each process may take in addition to what it has once the file is loaded. So libraries that
            the file imports do not count. What the function imports in its first call counts, also for the time.
        startup_timeout: Seconds that loading the file may take.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        processes: int,
        timeout: float,
        memory_gib: float,
        startup_timeout: float = 300.0,
    ) -> None:
        limits = {
            "processes": processes,
            "timeout": timeout,
            "memory_gib": memory_gib,
            "startup_timeout": startup_timeout,
        }
        for name, value in limits.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} {value} must be positive and finite")
        self.path = os.path.abspath(path)
        self.timeout = timeout
        self.memory_gib = memory_gib
        self.startup_timeout = startup_timeout
        self.failures: Counter[str] = Counter()
        self._slots = threading.Semaphore(processes)
        self._lock = threading.Lock()  # guards failures, _workers, _idle and _closed
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False
        # Workers die with the thread that started them. Therefore this thread lives as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="reward-pool")
        atexit.register(self.close)

    def __call__(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **kwargs: Any) -> dict:
        """Compute the reward of one response in the form that OpenRLHF's executor expects.

        Args:
            queries: The prompt with the response; length 1.
            prompts: The prompt; length 1.
            labels: The label; length 1. Labels and `kwargs` go through JSON: a tuple arrives as a list, and a key that
                is a number as a string.
            kwargs: Further arguments of the reward function.

        Returns:
            {"rewards": float, "scores": float, "extra_logs": {name: float}}

        Raises:
            RewardFailure: There is no reward.
            TypeError: JSON cannot hold a label or keyword argument.
            RuntimeError: The pool is closed.
        """
        if not len(queries) == len(prompts) == len(labels) == 1:
            lengths = len(queries), len(prompts), len(labels)
            raise ValueError(f"{lengths} queries, prompts and labels; a reward pool takes one response a call")
        try:
            request = encode([list(queries), list(prompts), list(labels), kwargs])
        except TypeError as error:
            kind = type(labels[0]).__name__
            raise TypeError(f"label of type {kind} (or a keyword argument) cannot be sent as JSON: {error}") from error
        with self._slots:
            worker = self._take()
            try:
                kind, answer = worker.ask(request, self.timeout)
            finally:
                self._put_back(worker)
        if kind != "result":
            raise self._failure(kind, f"reward_func {answer}")
        return answer

    def close(self) -> None:
        """Kill all processes. A call that is running raises RuntimeError."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        while (worker := self._pop_idle()) is not None:
            self._put_back(worker)
        self._starter.shutdown()
        atexit.unregister(self.close)

    def _take(self) -> "_Worker":
        """Take a free worker, or start a new one."""
        while (worker := self._pop_idle()) is not None:
            if worker.usable():
                return worker
            worker.kill()
            self._put_back(worker)
        self._check_open()
        worker = self._starter.submit(self._start).result()
        kind, answer = worker.ask(encode([str(entry) for entry in sys.path]), self.startup_timeout)
        if kind != "result":
            worker.kill()
            self._put_back(worker)
            raise self._failure(kind, f"loading it {answer}")
        return worker

    def _start(self) -> "_Worker":
        with self._lock:  # because close() must see every worker
            self._check_open()
            worker = _Worker(self.path, int(self.memory_gib * 2**30))
            self._workers.add(worker)
        return worker

    def _pop_idle(self) -> "_Worker | None":
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put_back(self, worker: "_Worker") -> None:
        """Make a living worker free again, and forget a dead one."""
        with self._lock:
            if worker.process.returncode is None:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
                worker.channel.close()

    def _failure(self, kind: str, what: str) -> Exception:
        self._check_open()
        with self._lock:
            self.failures[kind] += 1
        allowed = f": more than {self.memory_gib:g} GiB beyond the loaded file" if kind == "memory" else ""
        return RewardFailure(kind, f"{self.path}: {what}{allowed}")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the reward pool of {self.path} is closed")


class _Worker:
    """The parent's side of one process that runs `reward_worker.py`."""

    def __init__(self, path: str, memory: int) -> None:
        self._killing = threading.Lock()
        self.channel, theirs = socket.socketpair()
        # The script is started by its path, because with -m a file of the working directory could replace a module of
        # Python. It is unbuffered (-u), so that what a killed function printed is not lost.
        script = str(Path(__file__).with_name("reward_worker.py"))
        numbers = (memory, os.getpid(), theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", script, path, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that its children can be killed with it, and Ctrl-C does not reach it
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    def ask(self, request: bytes, seconds: float) -> tuple[str, Any]:
        """Return ("result", the answer) or (kind of failure, what happened); kill a process that cannot go on."""
        try:
            kind, answer = json.loads(self._exchange(request, time.monotonic() + seconds))
            if kind in ("result", "raised", "invalid"):
                return kind, answer
            if kind != "memory":
                raise ValueError(f"kind {kind!r}")
        except TimeoutError:
            kind, answer = "timeout", f"took more than {seconds:g} s and was killed"
        except EOFError:
            kind, answer = "crashed", f"ended its process: {_status(self.kill())}"
        except (OverflowError, ValueError, TypeError, RecursionError) as error:
            kind, answer = "invalid", f"gave an answer that cannot be read: {error}"
        except BaseException:
            self.kill()
            raise
        self.kill()
        return kind, answer

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        with contextlib.suppress(ConnectionError):  # the process ended, but its last reply can still be read
            self._wait_until(deadline)
            self.channel.sendall(request)
        reply = b""
        while not reply.endswith(b"\n"):
            self._wait_until(deadline)
            try:
                received = self.channel.recv(65536)
            except ConnectionError:
                received = b""
            if not received:
                raise EOFError
            reply += received
            if len(reply) > MAX_REPLY:
                raise OverflowError(f"it is longer than {MAX_REPLY} bytes")
        return reply

    def _wait_until(self, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self.channel.settimeout(seconds)

    def usable(self) -> bool:
        """Whether the process has sent nothing since its last call. It has if it died, or if it sends unasked."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> int:
        """Kill the process and its group, and return its exit status; a negative status is a signal."""
        with self._killing:
            if self.process.returncode is None:
                # A process that was already waited for is not killed, because another group may have its number.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return self.process.returncode


def _status(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by signal {-code} ({signal.strsignal(-code)})"

"""Calls a reward function in separate processes.

OpenRLHF calls `reward_func` in threads of its rollout engine. A thread cannot be stopped, an endless regular expression
holds the interpreter's lock, and a segmentation fault ends the engine. Here such a call costs one reward and not the
engine. This limits accidents and is not a sandbox: the function may do everything that the user may do. A program that
it starts is killed with it, unless that runs in a session of its own, or this process is killed from outside.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from bapo_openrlhf import user_file
from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.training.engine.reward_worker import encode
from bapo_openrlhf.training.wire.failures import Failures
from bapo_openrlhf.training.wire.signals import NUMBERS

MAX_REPLY = 2**20  # bytes; a reply is a few numbers, or an error of at most about 3,000 characters
SENT_AHEAD = 2**16  # bytes of requests that are sent together; they fit the buffer of the socket
FROM_OUTSIDE = (signal.SIGKILL, *NUMBERS)  # signals that somebody else sends, such as the kernel without memory
LOADING = 300.0  # seconds that loading the file may take
MOST_PRINTED = 4096  # bytes of a call that are passed on
TOGETHER = 0.02  # seconds that the calls of one exchange take, as far as is known


class RewardFailure(Exception):
    """A reward function gave no reward for a response. The message says why, and names the file.

    `kind` is "raised" (by the function, or when its file was loaded), "timeout", "crashed", "memory", or "invalid" if
    it did not return one finite number.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Call(Future):
    """The future of one call, and whether it is asked a second time."""

    def __init__(self, request: bytes) -> None:
        super().__init__()
        self.request, self.is_retry = request, False


class RewardPool:
    """Calls the `reward_func` of a file in up to `verifier.processes` processes, one response per call.

    Quick calls travel together: a process gets several requests at once and answers them in order. Each has its own
    time limit, which starts when the answer before it has arrived. If a call ends its process, the calls that were sent
    with it and not answered yet go to another one. A call whose process was killed from outside is asked once more.
    What the file imports counts neither for the time limit nor for the memory limit; what the function imports in its
    first call counts for both. The pool is thread-safe.
    """

    def __init__(self, path: str | os.PathLike, limits: VerifierConfig) -> None:
        self.limits = limits
        self.path = os.path.abspath(path)
        self.name = str(user_file.origin(Path(self.path)))  # in messages
        self.failures = Failures()
        self._changed = threading.Condition()  # guards everything below, and failures
        self._calls: deque[_Call] = deque()  # that no process has yet
        # Each process has a thread, which lives as long as the pool: a process dies with the thread that started it.
        self._threads: list[threading.Thread] = []
        self._busy = 0  # number of threads that serve calls now
        self._seconds = TOGETHER  # that the slowest call took lately
        self._workers: set[_Worker] = set()
        self._closed = False
        atexit.register(self.close)

    def submit(self, query: str, prompt: str, label: Any, response: str) -> _Call:
        """The future of {"rewards": float, "scores": float, "extra_logs": {name: float}} of one response.

        It has RewardFailure if there is no reward, and RuntimeError if the pool is closed. The label goes through JSON:
        a tuple arrives as a list, and a key that is a number as a string.

        Raises:
            TypeError: JSON cannot hold the label.
            RuntimeError: The pool is closed.
        """
        try:
            call = _Call(encode([[query], [prompt], [label], [response]]))
        except TypeError as error:
            raise TypeError(f"label of type {type(label).__name__} cannot be sent as JSON: {error}") from error
        with self._changed:
            self._check_open()
            self._calls.append(call)
            exchanges, rest = divmod(len(self._calls) - 1, self._together())
            if not rest:  # otherwise it goes with those before it
                self._wake(exchanges)
        return call

    def close(self) -> None:
        """Kill all processes. A call that is running or waiting raises RuntimeError."""
        with self._changed:
            self._closed = True
            workers = list(self._workers)
            self._changed.notify_all()
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        """Let one process after another answer calls until the pool is closed and no call is left."""
        worker: _Worker | None = None
        while calls := self._next_calls():
            queue = deque(calls)
            try:
                if worker is None or not worker.usable():
                    old_worker, worker = worker, None
                    self._forget(old_worker)
                    worker = self._started()
                slowest, start = 0.0, time.monotonic()
                for kind, answer in worker.ask([call.request for call in calls], self.limits.timeout):
                    if kind == "killed" and not queue[0].is_retry:
                        queue[0].is_retry = True
                        self._is_free(queue, slowest)
                        break
                    failure = None if kind == "result" else self._failure(kind, "reward_func", *answer)
                    call = queue.popleft()
                    slowest, start = max(slowest, time.monotonic() - start), time.monotonic()
                    last = not queue or worker.ended()
                    if last:
                        self._is_free(queue, slowest)
                    if failure is None:
                        call.set_result(answer)
                    else:
                        call.set_exception(failure)
                    if last:
                        break  # because another thread may have the calls that are left
            except Exception as error:  # the file cannot be loaded, or the pool is closed
                self._forget(worker)
                worker, call = None, queue.popleft()
                self._is_free(queue, 0.0)
                call.set_exception(error)
        self._forget(worker)

    def _next_calls(self) -> list[_Call]:
        """Wait for calls, and take as many as take TOGETHER seconds; none if the pool is closed and none is left."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return []
                limit, batch = self._together(), list[_Call]()
                room = SENT_AHEAD
                while self._calls and (not batch or (len(batch) < limit and len(self._calls[0].request) <= room)):
                    call = self._calls.popleft()
                    if call.running() or call.set_running_or_notify_cancel():
                        batch.append(call)
                        room -= len(call.request)
                if batch:
                    self._busy += 1
                    if self._calls:
                        self._wake(0)
                    return batch

    def _wake(self, count: int) -> None:
        """Let a process take calls, a new one if only so many are free as were woken before."""
        if count >= len(self._threads) - self._busy and len(self._threads) < self.limits.processes:
            self._threads.append(threading.Thread(target=self._serve, name="reward-pool", daemon=True))
            self._threads[-1].start()
        self._changed.notify()

    def _together(self) -> int:
        """Number of calls that take TOGETHER seconds if each takes as long as the slowest one lately; at least 1."""
        return max(1, int(TOGETHER / self._seconds))

    def _is_free(self, calls: Sequence[_Call], slowest: float) -> None:
        """Be free before the last answer is handed out, and give back the calls that were not answered."""
        with self._changed:
            self._busy -= 1
            # A slow call is remembered for a dozen exchanges or two, because the next slow ones would wait, too.
            self._seconds = max(slowest, 0.8 * self._seconds, 1e-5)
            self._calls.extendleft(reversed(calls))

    def _started(self, *, retry: bool = False) -> "_Worker":
        with self._changed:  # because close() must see every worker
            self._check_open()
            worker = _Worker(self.path, self.name, int(self.limits.memory_gib * 2**30))
            self._workers.add(worker)
        ((kind, answer),) = worker.ask([encode([str(entry) for entry in sys.path])], LOADING)
        if kind != "result":
            self._forget(worker)
            if kind == "killed" and not retry:
                return self._started(retry=True)
            raise self._failure(kind, "loading it", *answer)
        worker.place = str(answer) or self.name
        return worker

    def _forget(self, worker: "_Worker | None") -> None:
        if worker is not None:
            worker.kill()
            worker.close()
            with self._changed:
                self._workers.discard(worker)

    def _failure(self, kind: str, whose: str, what: str, place: str) -> Exception:
        kind = "crashed" if kind == "killed" else kind
        limit = f": more than {self.limits.memory_gib:g} GiB beyond the loaded file" if kind == "memory" else ""
        what = f"{whose} {what}{limit}"
        with self._changed:
            self._check_open()
            self.failures.add(kind, what, place)
        return RewardFailure(kind, f"{self.name}: {what}")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the reward pool of {self.name} is closed")


class _Worker:
    """The parent's side of one process that runs `reward_worker.py`."""

    def __init__(self, path: str, name: str, memory: int) -> None:
        self._kill_lock = threading.Lock()
        self._count = 0  # of requests so far
        self._data = b""  # a part of a reply
        self.place = name  # where a call that says no more went wrong: the file, then FILE:LINE of its function
        self.channel, theirs = socket.socketpair()
        self._printed = Printed(name)
        # The script is started by its path, because with -m a file of the working directory could replace a module of
        # Python. It is unbuffered (-u), so that what a killed function printed is not lost.
        script = str(Path(__file__).with_name("reward_worker.py"))
        numbers = (memory, os.getpid(), theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", script, path, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=self._printed.writer,
                stderr=self._printed.writer,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that its children can be killed with it, and Ctrl-C does not reach it
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        os.close(self._printed.writer)

    def ask(self, requests: Sequence[bytes], seconds: float) -> Iterator[tuple[str, Any]]:
        """Send requests (lines of JSON) together, and yield what becomes of each within so many seconds, in order.

        It is ("result", the answer) or (kind of failure, (what happened, FILE:LINE)). The kind "killed" is "crashed"
        from outside. A process that cannot go on is killed, and nothing is yielded after that.
        """
        first, self._count = self._count, self._count + len(requests)
        self._printed.begin(len(requests))
        lines = b"".join(b"[%d, %b]\n" % (first + place, line[:-1]) for place, line in enumerate(requests))
        for number in range(first, self._count):
            outcome = self._outcome(number, lines if number == first else b"", seconds)
            if last := self.ended() or number == self._count - 1:
                self._printed.end()
            yield outcome
            if last:
                return

    def _outcome(self, number: int, lines: bytes, seconds: float) -> tuple[str, Any]:
        """Send the lines and read the reply to request `number`."""
        deadline, reply_number = time.monotonic() + seconds, -1
        try:
            while reply_number is not None and reply_number < number:  # a call before it may have answered twice
                kind, answer, reply_number = json.loads(self._exchange(lines, deadline))
                lines = b""
            if kind == "result" and reply_number == number:
                return kind, answer
            if kind != "memory" and (kind not in ("raised", "invalid") or reply_number != number):
                raise ValueError(f"kind {kind!r}, for request {reply_number!r} and not {number}")
            what, place = map(str, answer)
            if kind != "memory":
                return kind, (what, place or self.place)
        except TimeoutError:
            kind, what = "timeout", f"took more than {seconds:g} s and was killed"
        except EOFError:
            code = self.kill()
            kind, what = "killed" if -code in FROM_OUTSIDE else "crashed", f"ended its process: {status(code)}"
        except (OverflowError, ValueError, TypeError, RecursionError) as error:
            kind, what = "invalid", f"gave an answer that cannot be read: {error}"
        self.kill()
        return kind, (what, self.place)

    def _exchange(self, lines: bytes, deadline: float) -> bytes:
        if lines:
            with contextlib.suppress(ConnectionError):  # the process ended, but its last reply can still be read
                self._wait_until(deadline)
                self.channel.sendall(lines)
        while b"\n" not in self._data:
            self._wait_until(deadline)
            if not self._printed.wait_for(self.channel, deadline - time.monotonic()):
                continue
            try:
                data = self.channel.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._data += data
            if b"\n" not in self._data and len(self._data) > MAX_REPLY:
                raise OverflowError(f"it is longer than {MAX_REPLY} bytes")
        reply, _, self._data = self._data.partition(b"\n")
        return reply

    def _wait_until(self, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self.channel.settimeout(seconds)

    def ended(self) -> bool:
        """Whether the process was killed, or is known to have ended."""
        return self.process.returncode is not None

    def usable(self) -> bool:
        """Whether the process has sent nothing since its last call. It has if it died, or if it sends unasked."""
        if self.ended() or self._data:
            return False
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close what is open to the process, which has ended."""
        self.channel.close()
        self._printed.close()

    def kill(self) -> int:
        """Kill the process and its group, and return its exit status; a negative status is a signal."""
        with self._kill_lock:
            if self.process.returncode is None:
                # A process that was already waited for is not killed, because another group may have its number.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return self.process.returncode


class Printed:
    """What a process of the user's code prints: passed on to standard error, but not without limit.

    A function that prints thousands of lines in each call would otherwise fill the log of a run with gigabytes. It is
    a pipe for the standard output and standard error of the process. Close `writer` here once the process has it.
    """

    def __init__(self, whose: str) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._whose, self._open = whose, True
        self._allowance, self._excess = MOST_PRINTED, 0  # bytes

    def begin(self, calls: int) -> None:
        """Allow MOST_PRINTED bytes for each of the calls that begin now. What comes between calls counts too."""
        self._pass_on()
        self._allowance = MOST_PRINTED * calls

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
            left_out = f"{self._excess:,} bytes that its code printed are left out"
            said = f"\n{self._whose}: {left_out}; the first {MOST_PRINTED:,} of a call are shown\n"
            os.write(2, said.encode())
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


def status(code: int) -> str:
    """An exit status in words; a negative one is a signal."""
    return f"exit status {code}" if code >= 0 else f"killed by signal {-code} ({signal.strsignal(-code)})"

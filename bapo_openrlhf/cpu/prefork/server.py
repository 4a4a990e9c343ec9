"""The process that has imported everything and forks the others.

    python -m bapo_openrlhf.cpu.prefork.server LISTENER MODULE:FUNCTION

LISTENER is the number of an inherited listening socket. FUNCTION prepares this process and returns `Prepared`. The
server and its children end when its standard input is closed. The process that started it closes it, at the latest when
it ends itself. The server blocks the signals that may go to every process of a job.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from bapo_openrlhf.cpu.prefork.client import FORWARDED, HEAD

MOST_FILES = 250  # the kernel passes at most 253 at a time
PATIENCE = 10.0  # seconds within which a request must arrive
OWNER = 0  # the standard input


@dataclass(frozen=True)
class Prepared:
    """How the process of the server was prepared."""

    fixed: Sequence[str] = ()  # variables that were read on import: a request with other values is refused
    in_child: Callable[[], None] = lambda: None  # is called in each child, in its own environment, before its program


class ForkRequest(NamedTuple):
    """What a child must become. `files` are the numbers of the `received` descriptors in the child."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    blocked: list[int]
    received: list[int]


def read_request(connection: socket.socket) -> ForkRequest:
    head, received, _, _ = socket.recv_fds(connection, HEAD, MOST_FILES)
    try:
        data = connection.makefile("rb").read(int.from_bytes(head, "big"))  # less if the client has left
        return ForkRequest(**json.loads(data), received=received)
    except (OSError, ValueError, TypeError):
        for file in received:
            os.close(file)
        raise


class Server:
    """Forks a child for each connection. The answers are its pid and, when it has ended, its wait status."""

    def __init__(self, listener: socket.socket, owner: int, prepared: Prepared) -> None:
        self.listener = listener
        self.prepared = prepared
        self.clients: dict[int, socket.socket] = {}  # by the pid of the child
        self.selector = selectors.DefaultSelector()
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wake[1])
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that the signal wakes the selector
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.wake[0], selectors.EVENT_READ, self.reap)
        self.selector.register(owner, selectors.EVENT_READ, self.end)

    def serve(self) -> ForkRequest:
        """Serve the clients. This returns only in a child, with its request."""
        while True:
            for key, _ in self.selector.select():
                request = key.data()
                if request is not None:
                    return request

    def accept(self) -> ForkRequest | None:
        """Fork a child for a new client. Only the child gets the request."""
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE)
        try:
            request = read_request(connection)
        except (OSError, ValueError, TypeError):
            connection.close()
            return None
        refused = any(request.environment.get(name) != os.environ.get(name) for name in self.prepared.fixed)
        pid = None if refused else os.fork()
        if pid == 0:
            self._forget()
            connection.close()
            return request
        for file in request.received:
            os.close(file)
        if pid is None:
            connection.close()  # without a pid, the client becomes Python itself
        else:
            self.clients[pid] = connection
            self.selector.register(connection, selectors.EVENT_READ, lambda: self.client_left(pid))
            self._answer(connection, pid)
        return None

    def _answer(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError):  # the client has left, and `client_left` will see that
            connection.sendall(f"{number}\n".encode())

    def _forget(self) -> None:
        """Close what belongs to the server. This runs in a child."""
        signal.set_wakeup_fd(-1)
        self.selector.close()
        self.listener.close()
        for client in self.clients.values():
            client.close()
        for end in self.wake:
            os.close(end)

    def client_left(self, pid: int) -> None:
        """Kill the child of a client that was killed."""
        if pid in self.clients:  # not yet reaped, so the pid is still its own
            self.selector.unregister(self.clients[pid])
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Tell the clients of children that have ended."""
        with suppress(BlockingIOError):
            os.read(self.wake[0], 4096)
        while self.clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self.clients.pop(pid)
            with suppress(KeyError):  # the client has left
                self.selector.unregister(connection)
            self._answer(connection, status)
            connection.close()

    def end(self) -> None:
        """End all children and this process."""
        for pid in self.clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def become(request: ForkRequest, prepared: Prepared, inherited: dict[str, str]) -> None:
    """Become the requested process, then run its program."""
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    base = max([2, *request.files, *request.received]) + 1
    copies = [os.dup2(file, base + place, inheritable=False) for place, file in enumerate(request.received)]
    os.closerange(3, base)
    for copy, number in zip(copies, request.files, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.chdir(request.folder)
    for name, value in request.environment.items():
        if os.environ.get(name) != value:  # because the title of a process overwrites its first environment
            os.environ[name] = value
    for name in inherited.keys() - request.environment.keys():
        os.environ.pop(name, None)
    for place in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(0, place)
    atexit.register(gc.unfreeze)  # otherwise an interrupted child is told that all of these objects were left over
    prepared.in_child()
    status = 0
    try:
        run(request.arguments)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    leave(status)


def leave(status: int) -> NoReturn:
    """End this process as Python does, but do not destroy thousands of modules, which would take seconds."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it was closed
            stream.flush()
    os._exit(status)


def run(arguments: Sequence[str]) -> None:
    """Run a script, `-m MODULE` or `-c CODE` like `python ARGUMENTS`. Flags of the interpreter are skipped."""
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        if words.pop(0) in ("-X", "-W"):
            words.pop(0)
    match words:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            main_module: Any = ModuleType("__main__")
            sys.modules["__main__"] = main_module
            exec(compile(code, "<string>", "exec"), main_module.__dict__)
        case [script, *rest]:
            sys.argv = [script, *rest]
            runpy.run_path(script, run_name="__main__")
        case _:
            raise SystemExit("nothing to run: give a script, -m MODULE or -c CODE")


@contextmanager
def ended_by_closing(file: int) -> Iterator[None]:
    """Within the block, this process ends as soon as the other end of a file is closed.

    The kernel then sends SIGIO, which ends a process that has no handler for it.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([file], [], [], 0)[0]:  # it was closed before
        sys.exit()
    yield
    fcntl.fcntl(file, fcntl.F_SETFL, flags)


def main() -> None:
    """Prepare, then serve."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    inherited = dict(os.environ)
    module, _, function = sys.argv[2].partition(":")
    with ended_by_closing(OWNER):
        prepared = getattr(importlib.import_module(module), function)()
    gc.collect()
    gc.freeze()  # so that a collection in a child does not copy all pages
    sys.stdout.flush()
    sys.stderr.flush()
    request = Server(socket.socket(fileno=int(sys.argv[1])), OWNER, prepared).serve()
    become(request, prepared, inherited)


if __name__ == "__main__":
    # Import it under its own name, so that `Prepared` is the same class here and in the function that prepares.
    from bapo_openrlhf.cpu.prefork import server

    server.main()

"""The process that has imported everything, and forks.

    python -m bapo_openrlhf.cpu.prefork.server LISTENER MODULE:FUNCTION

LISTENER is the number of an inherited listening socket. FUNCTION prepares this process and returns `Prepared`. The
server ends, and its children with it, when its standard input is closed: when whoever started it has ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from bapo_openrlhf.cpu.prefork.client import HEAD, REFUSED

MOST_FILES = 250  # the kernel passes 253 at a time
PATIENCE = 10.0  # seconds for a request to arrive


@dataclass(frozen=True)
class Prepared:
    """How the server's process was prepared.

    Attributes:
        fixed: environment variables that were read on import. Where a request has another value for one, it is refused.
        in_child: called in each child, in its own environment, before its program.
    """

    fixed: Sequence[str] = ()
    in_child: Callable[[], None] = lambda: None


class Request(NamedTuple):
    """What a child has to be.

    Attributes:
        arguments: of `python`.
        files: numbers that the received descriptors have in the child.
        received: their numbers here.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    received: list[int]


def read_request(connection: socket.socket) -> Request:
    """Read one; raises OSError or ValueError where the client left, or is none."""
    head, received, _, _ = socket.recv_fds(connection, HEAD, MOST_FILES)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the client left")
        data += part
    return Request(**json.loads(data), received=received)


class Server:
    """Forks a child for each connection; tells its pid and, when it has ended, its wait status."""

    def __init__(self, listener: socket.socket, owner: int, prepared: Prepared, inherited: dict[str, str]) -> None:
        """
        Args:
            owner: descriptor that ends when the server has to.
            inherited: environment before the preparation.
        """
        self.listener = listener
        self.prepared = prepared
        self.inherited = inherited
        self.clients: dict[int, socket.socket] = {}  # by the pid of the child
        self.selector = selectors.DefaultSelector()
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wake[1])
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.wake[0], selectors.EVENT_READ, self.reap)
        self.selector.register(owner, selectors.EVENT_READ, self.end)

    def serve(self) -> Request:
        """Serve; returns in a child alone, with what it has to be."""
        while True:
            for key, _ in self.selector.select():
                request = key.data()
                if request is not None:
                    return request

    def accept(self) -> Request | None:
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE)
        try:
            request = read_request(connection)
        except (OSError, ValueError, TypeError):
            connection.close()
            return None
        if any(request.environment.get(name) != os.environ.get(name) for name in self.prepared.fixed):
            self._answer(connection, REFUSED)
            connection.close()
            pid = None
        else:
            pid = os.fork()
            if pid == 0:
                self._forget()
                connection.close()
                return request
        for file in request.received:
            os.close(file)
        if pid is not None:
            self.clients[pid] = connection
            self.selector.register(connection, selectors.EVENT_READ, lambda: self.client_left(pid))
            self._answer(connection, str(pid))
        return None

    def _answer(self, connection: socket.socket, line: str) -> None:
        with suppress(OSError):  # its client has left: `client_left` sees that too
            connection.sendall(f"{line}\n".encode())

    def _forget(self) -> None:
        """Close what is the server's own, in a child."""
        signal.set_wakeup_fd(-1)
        self.selector.close()
        self.listener.close()
        for client in self.clients.values():
            client.close()
        for end in self.wake:
            os.close(end)

    def client_left(self, pid: int) -> None:
        """A client that was killed takes its child along."""
        if pid in self.clients:  # not yet reaped, so it is no other process
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
            with suppress(KeyError):  # its client has left
                self.selector.unregister(connection)
            self._answer(connection, str(status))
            connection.close()

    def end(self) -> None:
        """End all children and this process."""
        for pid in self.clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def become(request: Request, prepared: Prepared, inherited: dict[str, str]) -> None:
    """Be the process that was asked for, then run its program.

    Variables with the same value are left alone, for a process's title is written over its first environment.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    above = max([2, *request.files, *request.received]) + 1
    copies = [os.dup2(file, above + place, inheritable=False) for place, file in enumerate(request.received)]
    os.closerange(3, above)
    for copy, number in zip(copies, request.files, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.chdir(request.folder)
    for name, value in request.environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    for name in inherited.keys() - request.environment.keys():
        os.environ.pop(name, None)
    for place in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(0, place)
    atexit.register(gc.unfreeze)  # or libraries that count what is left at the end would find all of it
    prepared.in_child()
    run(request.arguments)


def run(arguments: Sequence[str]) -> None:
    """As `python ARGUMENTS`: a script, `-m MODULE` or `-c CODE`. Flags of the interpreter before it do nothing."""
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


def main() -> None:
    """Prepare, then serve."""
    inherited = dict(os.environ)
    module, _, function = sys.argv[2].partition(":")
    prepared = getattr(importlib.import_module(module), function)()
    gc.collect()
    gc.freeze()  # so that a child's collections do not copy all pages
    sys.stdout.flush()
    sys.stderr.flush()
    request = Server(socket.socket(fileno=int(sys.argv[1])), 0, prepared, inherited).serve()
    become(request, prepared, inherited)


if __name__ == "__main__":
    # Under its own name: `Prepared` of a module that was imported must be this one.
    from bapo_openrlhf.cpu.prefork import server

    server.main()

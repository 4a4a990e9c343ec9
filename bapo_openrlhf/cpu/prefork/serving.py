"""Start the server for the time of a block."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo_openrlhf.cpu.prefork import client

PYTHON = "python"  # in the server's folder: the client as one executable


@contextmanager
def serving(prepare: str) -> Iterator[None]:
    """A server for the time of the block, in the environment of this process and its children.

    Does not wait for the server: the first clients do. Within the block of another one, that one serves.

    Args:
        prepare: MODULE:FUNCTION that imports and returns `server.Prepared`.

    Warns:
        RuntimeWarning: there is no server, for the path of the folder for temporary files is too long for a socket, or
            it failed (told at the end); all processes are started as ever, then.
    """
    if environment():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="prefork-") as name, (Path(name) / "log").open("w+") as log:
        executable = Path(name) / PYTHON
        executable.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", client.__file__])} "$@"\n')
        executable.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(str(Path(name) / client.SOCKET))
            except OSError as error:
                warnings.warn(f"no process is forked: {name}: {error}", RuntimeWarning, stacklevel=2)
                yield
                return
            listener.listen(128)
            number = listener.fileno()
            server = subprocess.Popen(
                [sys.executable, "-m", "bapo_openrlhf.cpu.prefork.server", str(number), prepare],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[number],
                start_new_session=True,
            )
        os.environ[client.ADDRESS] = name
        try:
            yield
        finally:
            del os.environ[client.ADDRESS]
            if server.poll() is not None:
                log.seek(0)
                last = " ".join(log.read().split("\n")[-2:]).strip()
                warnings.warn(f"no process was forked, each imported for itself: {last}", RuntimeWarning, stacklevel=2)
            server.communicate()


def environment() -> dict[str, str]:
    """What a process needs in its environment to be served: nothing outside of a block of `serving`."""
    folder = os.environ.get(client.ADDRESS)
    return {client.ADDRESS: folder} if folder else {}


def python() -> str:
    """The executable that stands for Python: one that forks, within a block of `serving`; else Python's own."""
    served = environment()
    return str(Path(served[client.ADDRESS]) / PYTHON) if served else sys.executable


def use_in_multiprocessing() -> None:
    """Have this process's multiprocessing start its processes by `python()`, where it does not fork itself."""
    multiprocessing.set_executable(python())

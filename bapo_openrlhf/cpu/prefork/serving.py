"""Starts the server for the time of a block."""

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

PYTHON = "python"  # file in the folder of the server: the client as one executable


@contextmanager
def serving(prepare: str) -> Iterator[None]:
    """Offer a server to this process and its children, through their environment, for the time of the block.

    The block does not wait for the server; the first clients do. An inner block uses the server of the outer one.
    `prepare` is MODULE:FUNCTION, which imports and returns `server.Prepared`. A RuntimeWarning says why there is no
    server, so that all processes start in the usual way.
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
                # No program may be executed there, or the path is too long for a socket.
                subprocess.run([executable, "-I", "-S", "-c", ""])  # otherwise Ray would wait for it without end
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
                # setproctitle looks for the variable that came first, so this must be one that no child changes.
                env={client.ADDRESS: name} | os.environ | {client.ADDRESS: name},
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
    """The variables that a process needs in order to be served. Empty outside a block of `serving`."""
    folder = os.environ.get(client.ADDRESS)
    return {client.ADDRESS: folder} if folder else {}


def python() -> str:
    """The executable to use as Python. It forks inside a block of `serving`. Otherwise it is Python itself."""
    variables = environment()
    return str(Path(variables[client.ADDRESS]) / PYTHON) if variables else sys.executable

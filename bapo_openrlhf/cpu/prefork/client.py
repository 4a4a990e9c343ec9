"""Replaces `python ARGUMENTS` by a process that the server forks. This file imports only the standard library.

If this process is killed, the child is killed too. If no server answers, or the server was prepared in another
environment, this process becomes Python itself, which is only slower.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import TextIO

ADDRESS = "BAPO_OPENRLHF_PREFORK"  # environment variable: the server's folder
SOCKET = "socket"  # in that folder
HEAD = 8  # bytes that hold the length of the request, big-endian; the open files are sent with them
FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip


def inherited_files() -> list[int]:
    """Descriptors that a child of this process would inherit."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself, which is closed by now
            if os.get_inheritable(int(name)):
                files.append(int(name))
    return sorted(files)


def ask(arguments: list[str], blocked: Collection[int]) -> tuple[int, TextIO] | None:
    """Ask for a child that blocks these signals: its pid, and the file whose next line is its wait status; or None."""
    files = inherited_files()
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "blocked": sorted(blocked),
    }
    data = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.path.join(os.environ[ADDRESS], SOCKET))
        socket.send_fds(connection, [len(data).to_bytes(HEAD, "big")], files)
        connection.sendall(data)
        answers = connection.makefile()
        return int(answers.readline()), answers
    except (OSError, KeyError, ValueError):
        connection.close()
        return None


def main() -> None:
    """Behave like the child, seen from outside."""
    # They are blocked because the child may run before its pid is known here.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    answer = ask(sys.argv[1:], mask)
    if answer is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    child, answers = answer

    def forward(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    line = answers.readline()
    status = int(line) if line else signal.SIGKILL  # no line: the server has ended and has killed its children
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()

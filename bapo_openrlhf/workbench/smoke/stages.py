"""Stages of a smoke run: the time of each, and the processes of the run."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bapo_openrlhf import machine
from bapo_openrlhf.errors import RunError
from bapo_openrlhf.workbench.pages.text import duration

MARK = "BAPO_OPENRLHF_SMOKE"  # in the environment of each process of a smoke run
PATIENCE = 900.0  # seconds after which a stage hangs
# Ray's services, which hold no model. Some wait a minute for a server that was killed.
SERVICES = (b"/ray/dashboard/", b"/runtime_env/agent/", b"Agent", b"monitor.py")


def variables_of(mark: str) -> dict[str, str]:
    """Environment variables by which the processes of a run are found. They fork from a process of their own."""
    return {MARK: mark, **machine.ALONE}


def processes(mark: str) -> Iterator[Path]:
    """The folders in /proc of the processes of a run."""
    variable = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended, or it is another user's
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    yield folder


def survivors(mark: str) -> list[str]:
    """Command lines of the processes of a run that hold a model."""
    commands = []
    for folder in processes(mark):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if command and not any(service in command for service in SERVICES):
                commands.append(command.replace(b"\0", b" ").decode(errors="replace").strip())
    return commands


@dataclass
class Stages:
    """The stages of a smoke run. Each is said as soon as it has ended."""

    mark: str  # of the processes of the run
    say: Callable[[str], None]  # prints a line
    show: Callable[[str], None]  # says on a terminal what goes on now
    now: str = "checks"

    def begin(self, name: str) -> None:
        """A stage begins."""
        self.now = name
        self.show(name)

    def ended(self, begun: float, at: float) -> None:
        """Say that the stage has ended; its first and its last moment are `time.time()`."""
        self.say(f"  {self.now:<14}{duration(at - begun):>8}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage that lasts as long as the block."""
        self.begin(name)
        begun = time.time()
        yield
        self.ended(begun, time.time())

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """End all processes of the run after the block."""
        try:
            yield
        finally:
            for _ in range(50):  # a process may start another one before it ends
                folders = list(processes(self.mark))
                for folder in folders:
                    with suppress(ProcessLookupError):
                        os.kill(int(folder.name), signal.SIGKILL)
                if not folders:
                    break
                time.sleep(0.1)

    def wait(self, until: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
        """Wait until something has happened; a RunError if the process has ended before, or it takes too long."""
        begun = time.monotonic()
        while not until():
            if process is not None and process.poll() is not None and not until():
                raise RunError(f"the run ended with status {process.returncode}")
            if time.monotonic() - begun > PATIENCE:
                raise RunError(f"nothing happened for {duration(PATIENCE)}")
            time.sleep(0.2)

"""The runs of a study, several at a time in one Ray, each `bapo-openrlhf train` in a process of its own.

    OUT/study.json               the definition, and where it was run
    OUT/runs/ARM-sSEED/          a run's record (`run.record`), its command (command.json) and its output (output.log)

A run is done when it has its summary.json. The same command goes on where the last one stopped: runs that are done
stay, one that was interrupted goes on from its last checkpoint, where its flags have some written, or starts again.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bapo_openrlhf.cpu.prefork import serving
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.study.definition import Arm, Study

RUNS = "runs"
COMMAND = "command.json"
OUTPUT = "output.log"
PLACE = ("--run.dir=", "--ckpt.path=", "--ckpt.output_dir=")
POLL = 0.5  # seconds between two looks at the running processes
TRAIN = ("-m", "bapo_openrlhf.cli.train")  # of Python


@dataclass(frozen=True)
class Planned:
    """A run of the study.

    Attributes:
        folder: of its record.
        words: of `bapo-openrlhf train`.
    """

    arm: Arm
    seed: int
    folder: Path
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """ARM-sSEED."""
        return self.folder.name

    @property
    def done(self) -> bool:
        """Whether it has ended well."""
        return (self.folder / record.SUMMARY).exists()


@dataclass
class Running:
    """A run that goes on."""

    planned: Planned
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)


@dataclass
class Outcome:
    """What became of the runs.

    Attributes:
        done: how many are, those of earlier calls included.
        failed: names of those that ended in this call without being done.
        left: how many were not begun, for time ran out.
    """

    done: int = 0
    failed: list[str] = field(default_factory=list)
    left: int = 0


def plan(study: Study, out: Path) -> list[Planned]:
    """All runs, seed by seed: an unfinished study has whole grids of its first seeds."""
    planned = []
    for seed in study.seeds:
        for arm in study.arms:
            folder = out / RUNS / f"{arm.name}-s{seed}"
            place = {
                "run.dir": folder.parent,
                "run.name": folder.name,
                "run.logs": "progress",
                "ckpt.path": folder / "checkpoints",
                "ckpt.output_dir": folder / "model",
            }
            words = [*study.words(arm, seed), *(f"--{name}={value}" for name, value in place.items())]
            planned.append(Planned(arm, seed, folder, (*words, "--ckpt.load_enable")))
    return planned


def require_same(planned: Sequence[Planned]) -> None:
    """Raise ConfigError where a run that has begun was begun with other flags. Where it lies does not count."""
    for run in planned:
        file = run.folder / COMMAND
        if not file.exists():
            continue
        before, now = (_wherever(words) for words in (json.loads(file.read_text(encoding="utf-8")), run.words))
        if before != now:
            gone = [word for word in before if word not in now]
            new = [word for word in now if word not in before]
            raise ConfigError(
                f"study: run {run.name} in {run.folder.parent} was begun with {' '.join(gone) or 'fewer flags'}, now "
                f"there is {' '.join(new) or 'none of it'}; give another --output, or delete that run's folder"
            )


def _wherever(words: Sequence[str]) -> list[str]:
    """A run's words without its place, and files by their names: a study's folder may be moved."""
    return [Path(word).name if word.startswith("/") else word for word in words if not word.startswith(PLACE)]


def run_all(
    planned: Sequence[Planned],
    *,
    parallel: int,
    environment: dict[str, str],
    until: float | None,
    seen: Callable[[Sequence[Running], Sequence[Planned]], None] = lambda running, ended: None,
    command: Sequence[str] | None = None,
) -> Outcome:
    """Run what is not done.

    Args:
        planned: all runs, in the order in which they are begun.
        parallel: runs at a time.
        environment: added to that of the runs' processes.
        until: time.monotonic() after which none is begun; None for no limit.
        seen: called now and then with the runs that go on, and those that have ended since the last call.
        command: what is called with a run's words; None for training.
    """
    command = command or (serving.python(), *TRAIN)
    outcome = Outcome(done=sum(run.done for run in planned))
    waiting = [run for run in planned if not run.done]
    running: list[Running] = []
    try:
        while waiting or running:
            late = until is not None and time.monotonic() > until
            while waiting and len(running) < parallel and not late:
                running.append(_start(waiting.pop(0), command, environment))
            ended = [one for one in running if one.process.poll() is not None]
            running = [one for one in running if one not in ended]
            for one in ended:
                if one.process.returncode == 0 and one.planned.done:
                    outcome.done += 1
                else:
                    outcome.failed.append(one.planned.name)
            seen(running, [one.planned for one in ended])
            if late and not running:
                outcome.left = len(waiting)
                break
            time.sleep(POLL)
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.wait()
    return outcome


def _start(run: Planned, command: Sequence[str], environment: dict[str, str]) -> Running:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / COMMAND).write_text(json.dumps(run.words, indent=2) + "\n", encoding="utf-8")
    with (run.folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [*command, *run.words],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    return Running(run, process)


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Raise ConfigError where another process is running this study already."""
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"study: {out} is being run by another process; wait for it, or stop it") from None
        yield

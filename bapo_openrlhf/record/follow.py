"""Follows the record of a run while it is written.

Each byte is read only once. A file that is not the same as before, for example after a resume, is read again.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import shapes
from bapo_openrlhf.record.owner import is_gone
from bapo_openrlhf.record.run_record import (
    BY_STEP,
    EVALUATIONS,
    METRICS,
    RUN,
    SHAPES,
    SUMMARY,
    WARNINGS,
    mean_of,
    parsed,
)

OVERLAP = 512  # bytes before the last position that are read again, to check that they are still the same
RECENT = 20  # steps that rates, times and warnings cover
ATTRIBUTES = {RUN: "run", WARNINGS: "warnings", EVALUATIONS: "evaluations", SUMMARY: "summary"}
LONG, MANY = 120.0, 10  # a run is silent after LONG seconds, or after MANY times the seconds of a step if that is more


@dataclass
class Seen:
    """What is known about a run. Broken lines and damaged files are skipped."""

    name: str
    rows: Sequence[Mapping[str, Any]] = ()  # one per step, oldest first, as `run_record.read_metrics` returns them
    run: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    age: float | None = None  # seconds since metrics.jsonl was written, or run.json if that was later
    problem: str | None = None  # why the record could not be read
    broken: int = 0  # lines that contain no row
    warnings: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    damaged: set[str] = field(default_factory=set)  # files that say something else than a run writes there
    killed: bool = False  # its process was one of this machine that is gone without a word
    begins: bool = False  # it was started or resumed, and has made no step since: run.json is newer

    @property
    def recent(self) -> Sequence[Mapping[str, Any]]:
        return self.rows[-RECENT:]

    @property
    def total(self) -> int | None:
        """Number of steps of the whole run. None if unknown."""
        return self.run.get("total_steps") or (len(self.rows) if self.ended else None)

    @property
    def ended(self) -> bool:
        """Whether the run has ended: it has a summary of exactly these steps."""
        return bool(self.summary) and self.summary.get("steps") == len(self.rows)

    @property
    def how(self) -> str | None:
        """How the run ended: as run.json says it, or killed. None if it goes on, as far as is known."""
        if self.ended:
            return "untrained" if self.summary.get("nothing_trained") else "finished"
        return self.run.get("ended", {}).get("how", "killed" if self.killed else None)

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a recent step."""
        return mean_of(self.recent, "timing/step_total")

    @property
    def is_silent(self) -> bool:
        """Whether the next step is long overdue. While a run begins, its models are loaded."""
        step = max(self.step_seconds or 60.0, 60.0 * self.begins)
        return self.how is None and self.age is not None and self.age > max(LONG, MANY * step)


class Follower(Seen):
    """What the last `poll` found in the folder of a run; a ConfigError if there is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            state = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f"run folder {str(folder)!r} {state}; give the folder of a run on this machine, DIR/NAME")
        super().__init__(folder.resolve().name, [])
        self.folder = folder
        self._written: dict[str, tuple[int, int, int]] = {}  # inode, size and time of change of each file that is there
        self._end, self._last = 0, b""  # position up to which metrics.jsonl was read, and the bytes before it

    def poll(self) -> None:
        """Read what is new."""
        self.problem = None if self.folder.is_dir() else f"{self.folder} is not there any more"
        if self.problem:
            return
        for name in (RUN, METRICS, WARNINGS, EVALUATIONS, SUMMARY):
            try:
                self._look(name)
            except OSError as error:  # for example a mount that has lost its server
                self.problem = f"{self.folder / name} cannot be read: {error.strerror}"
        times = {name: self._written[name][2] for name in (METRICS, RUN) if name in self._written}
        latest = max(times, key=times.__getitem__, default=None)  # of equal times the step's
        self.begins = latest == RUN
        self.killed = is_gone(self.folder)
        self.age = None if latest is None else max(time.time() - times[latest] / 1e9, 0.0)

    def _look(self, name: str) -> None:
        try:
            with open(self.folder / name, "rb") as file:
                status = os.fstat(file.fileno())
                before, now = self._written.get(name), (status.st_ino, status.st_size, status.st_mtime_ns)
                if name == METRICS:
                    self._take_rows(file)
                elif before != now:
                    self._take_document(name, file.read())
                self._written[name] = now
        except FileNotFoundError:
            self._written.pop(name, None)
            if name == METRICS:
                self._begin_again()
            else:
                self._take_document(name, b"" if name in BY_STEP else b"{}")

    def _begin_again(self) -> None:
        self.rows, self.broken, self._end, self._last = [], 0, 0, b""

    def _take_rows(self, file: BinaryIO) -> None:
        file.seek(self._end - len(self._last))
        data = file.read()
        if not data.startswith(self._last):
            self._begin_again()
            file.seek(0)
            data = file.read()
        new = data[len(self._last) : data.rfind(b"\n") + 1]
        for line in new.split(b"\n")[:-1]:
            row = _row(line)
            if row is None:
                self.broken += 1
            else:
                self.rows.append(row)
        self._end, self._last = self._end + len(new), (self._last + new)[-OVERLAP:]

    def _take_document(self, name: str, data: bytes) -> None:
        """Take a JSON object, or a few rows. What is half-written is taken when the file changes again."""
        attribute, shape = ATTRIBUTES[name], SHAPES[name]
        if name in BY_STEP:
            setattr(self, attribute, [row for row in map(_row, data.split(b"\n")[:-1]) if row and shape(row)])
            return
        document = parsed(data)
        if shape(document):
            setattr(self, attribute, document)
            self.damaged.discard(name)
        else:
            self.damaged.add(name)


def _row(line: bytes) -> dict[str, Any] | None:
    row = parsed(line, _shared_keys)
    return row if shapes.numbers(row) else None


def _shared_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Store each of the hundred metric names only once for the ten thousand rows."""
    return {sys.intern(key): value for key, value in pairs}

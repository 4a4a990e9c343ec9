"""Follows the record of a run while it is written, in a local folder or on a network mount.

Each byte is read only once. A file may also be half-written, or shorter than before because a resume has dropped steps,
or rewritten, or replaced. A file that is not the same as before is read again from its beginning.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.run_record import METRICS, RUN, SUMMARY, mean_of

OVERLAP = 512  # bytes before the last position that are read again, to check that they are still the same
PATIENCE = 20  # times that a line without a row is read again before it is skipped
RECENT = 20  # steps that rates, times and warnings cover
LONG, MANY = 120.0, 10  # a run is silent after LONG seconds, or after MANY times the seconds of a step if that is more


@dataclass
class Seen:
    """What is known about a run.

    Attributes:
        name: Name of its folder.
        rows: One row per step, oldest first, as `run_record.read_metrics` returns them.
        run, summary: Contents of run.json and summary.json. Empty if there is no such file.
        age: Seconds since metrics.jsonl was written. Before the first step run.json counts instead. None if there is
            neither file.
        problem: Why the record could not be read. None if it could.
        broken: Number of lines that contain no row and were skipped.
    """

    name: str
    rows: Sequence[Mapping[str, Any]] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    age: float | None = None
    problem: str | None = None
    broken: int = 0

    @property
    def recent(self) -> Sequence[Mapping[str, Any]]:
        """The last steps."""
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
    def step_seconds(self) -> float | None:
        """Mean seconds of a recent step."""
        return mean_of(self.recent, "timing/step_total")

    @property
    def is_silent(self) -> bool:
        """Whether the next step is long overdue."""
        return not self.ended and self.age is not None and self.age > max(LONG, MANY * (self.step_seconds or 60.0))


class Follower(Seen):
    """What the last `poll` found in the folder of a run.

    Raises:
        ConfigError: There is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            state = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f"run folder {str(folder)!r} {state}; give the folder of a run, DIR/NAME")
        super().__init__(folder.resolve().name, [])
        self.folder = folder
        self._files = {name: _File(folder / name) for name in (RUN, METRICS, SUMMARY)}
        self._suspect: tuple[int, bytes, int] | None = None  # offset of a line without a row, the line, times seen

    def poll(self) -> None:
        """Read what is new."""
        self.problem = None if self.folder.is_dir() else f"{self.folder} is not there any more"
        if self.problem:
            return
        for name, file in self._files.items():
            try:
                data = file.read()
            except OSError as error:  # for example a mount that has lost its server
                self.problem = f"{file.path} cannot be read: {error.strerror}"
                continue
            if name == METRICS:
                self._take_rows(file, data)
            else:
                self._take_document(name, file, data)
        written = self._files[METRICS].written or self._files[RUN].written
        self.age = None if written is None else max(time.time() - written, 0.0)

    def _take_rows(self, file: "_File", data: bytes) -> None:
        """Take the whole lines from `data`. The rest is read again by the next `poll`."""
        if file.end == 0:
            self.rows, self.broken = [], 0
        used = len(file.overlap)
        while (end := data.find(b"\n", used)) >= 0:
            row = _row(data[used:end])
            if row is not None:
                self.rows.append(row)
            elif self._is_pending(file.offset + used, data[used:end]):
                break
            used = end + 1
        file.advance(data[len(file.overlap) : used])

    def _is_pending(self, offset: int, line: bytes) -> bool:
        """Whether a line without a row may become one: a network mount can show a size before it has the bytes."""
        seen = self._suspect[2] + 1 if self._suspect and self._suspect[:2] == (offset, line) else 1
        self._suspect = (offset, line, seen)
        if seen <= PATIENCE:
            return True
        self.broken += 1
        return False

    def _take_document(self, name: str, file: "_File", data: bytes) -> None:
        """Take a whole JSON object. It is always replaced and never appended to."""
        found: dict[str, Any] = {}
        if file.identity is not None:
            if file.end:
                return  # unchanged
            try:
                found = dict(json.loads(data))
            except (ValueError, TypeError):
                return  # half-written, so it is read again
            file.advance(data)
        setattr(self, "run" if name == RUN else "summary", found)


class _File:
    """A file and the position up to which it was read.

    Attributes:
        identity: Device and inode, which tell this file from one that replaced it. None if there is no file.
        written: Time of its last change. None if there is no file.
        end: Position up to which it was read.
        overlap: The last bytes before `end`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.identity: tuple[int, int] | None = None
        self.written: float | None = None
        self.end, self.overlap = 0, b""

    @property
    def offset(self) -> int:
        """Position from which `read` reads."""
        return self.end - len(self.overlap)

    def read(self) -> bytes:
        """Return `overlap` and all bytes after it, or the whole file if it is not the same as before."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                file.seek(self.offset)
                data = file.read()
                if self.end and (identity != self.identity or not data.startswith(self.overlap)):
                    self.end, self.overlap = 0, b""
                    file.seek(0)
                    data = file.read()
                self.identity, self.written = identity, status.st_mtime
                return data
        except FileNotFoundError:
            self._forget()
            return b""

    def advance(self, data: bytes) -> None:
        """Note that `data` was used."""
        self.end += len(data)
        self.overlap = (self.overlap + data[-OVERLAP:])[-OVERLAP:]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_shared_keys)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _shared_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Store each of the hundred metric names only once for the ten thousand rows."""
    return {sys.intern(key): value for key, value in pairs}

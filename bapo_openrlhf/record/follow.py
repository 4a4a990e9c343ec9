"""Following a run's record while it is written: here, on a network mount, or over ssh.

Each byte is read once. A file may also be seen half-written, shorter than before (a resume drops steps), rewritten or
replaced: then it is read again from its beginning.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.run_record import METRICS, RUN, SUMMARY

OVERLAP = 512  # bytes before the place that was reached, read again to see that they are still the same
PATIENCE = 20  # times that a line which is no row is read again before it is passed over


@dataclass(frozen=True)
class Reading:
    """What one look at a file found.

    Attributes:
        identity: tells this file from one that replaced it; None where there is no file.
        age: seconds since it was written; None when not known.
        data: its bytes from the offset asked for to its end.
    """

    identity: str | None
    age: float | None = None
    data: bytes = b""


class Files(Protocol):
    """A folder to look into: `LocalFiles` or `RemoteFiles`."""

    name: str  # of the folder
    problem: str | None  # why it cannot be read just now

    def read(self, offsets: Mapping[str, int]) -> dict[str, Reading]:
        """What is in the named files from these offsets on; a file that is not among the results is not known now."""
        ...

    def close(self) -> None:
        """Look no more."""
        ...


class Follower:
    """A run's steps, run.json and summary.json, as `poll` last saw them.

    Attributes:
        rows: the steps, oldest first, as `record.read_metrics` gives them.
        run, summary: run.json and summary.json; empty where there is none.
        age: seconds since metrics.jsonl was written, or run.json before the first step; None when not known.
        ready: whether the files were looked into yet.
        broken: lines that are no rows, and were passed over.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.rows: list[dict[str, Any]] = []
        self.run: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.age: float | None = None
        self.ready = False
        self.broken = 0
        self._places = {name: _Place() for name in (RUN, METRICS, SUMMARY)}
        self._suspect: tuple[int, bytes, int] | None = None  # offset of a line that is no row, the line, times seen

    def poll(self) -> bool:
        """Look once; returns whether there was anything new."""
        changed = False
        for _ in range(2):  # again, where a file has to be read from its beginning
            readings = self.files.read({name: place.offset for name, place in self._places.items()})
            restarted = False
            for name, reading in readings.items():
                place = self._places[name]
                if place.end and not place.is_in(reading):
                    place.restart()
                    self.broken = 0 if name == METRICS else self.broken
                    if reading.identity is not None:  # what was read of it stays until it has been read again
                        restarted = True
                        continue
                place.identity = reading.identity
                changed |= self._take_rows(place, reading) if name == METRICS else self._take(name, place, reading)
            if readings and not restarted:
                ages = [readings[name].age for name in (METRICS, RUN) if name in readings]
                self.age = next((age for age in ages if age is not None), None)
                self.ready = True
            if not restarted:
                break
        return changed

    def _take_rows(self, place: _Place, reading: Reading) -> bool:
        """Whole lines alone: what is behind the last one is read again."""
        fresh, rows = place.end == 0, []
        data, used = reading.data, len(place.overlap)
        while (end := data.find(b"\n", used)) >= 0:
            row = _row(data[used:end])
            if row is not None:
                rows.append(row)
            elif self._is_pending(place.offset + used, data[used:end]):
                break
            used = end + 1
        place.advance(data[len(place.overlap) : used])
        if fresh:
            changed, self.rows = rows != self.rows, rows
            return changed
        self.rows.extend(rows)
        return bool(rows)

    def _is_pending(self, offset: int, line: bytes) -> bool:
        """Whether a line that is no row may become one: a network mount can show a file's end before it is filled."""
        seen = self._suspect[2] + 1 if self._suspect and self._suspect[:2] == (offset, line) else 1
        self._suspect = (offset, line, seen)
        if seen <= PATIENCE:
            return True
        self.broken += 1
        return False

    def _take(self, name: str, place: _Place, reading: Reading) -> bool:
        """One JSON object, whole: it is replaced, never appended to."""
        found: dict[str, Any] = {}
        if reading.identity is not None:
            if place.end:
                return False  # the same as before
            try:
                found = dict(json.loads(reading.data))
            except (ValueError, TypeError):
                return False  # half-written: read again
            place.advance(reading.data)
        attribute = "run" if name == RUN else "summary"
        changed = found != getattr(self, attribute)
        setattr(self, attribute, found)
        return changed


class _Place:
    """How far a file was read."""

    def __init__(self) -> None:
        self.identity: str | None = None
        self.restart()

    def restart(self) -> None:
        """From the beginning."""
        self.end = 0
        self.overlap = b""  # the bytes before `end`

    @property
    def offset(self) -> int:
        """Where to read from."""
        return self.end - len(self.overlap)

    def is_in(self, reading: Reading) -> bool:
        """Whether the reading is of the file that was read so far."""
        return reading.identity == self.identity and reading.data.startswith(self.overlap)

    def advance(self, data: bytes) -> None:
        """`data` was read."""
        self.end += len(data)
        self.overlap = (self.overlap + data[-OVERLAP:])[-OVERLAP:]


def _row(line: bytes) -> dict[str, Any] | None:
    """A step's row; None where the line is none."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_shared_keys)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _shared_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hundred names in each of ten thousand rows: kept once."""
    return {sys.intern(key): value for key, value in pairs}


# ── Where the files are ──


def open_run(target: str) -> LocalFiles | RemoteFiles:
    """The folder of a run: a path, or `[user@]host:path`, which is read over ssh. A path that exists is a path.

    Raises:
        ConfigError: there is no such folder, or ssh does not get there.
    """
    host, colon, folder = target.partition(":")
    if not colon or "/" in host or Path(target).exists():
        return LocalFiles(Path(target))
    if not host or host.startswith("-") or not folder or not target.isprintable() or " " in host:
        raise ConfigError(f"run {target!r} must be a folder, or [user@]host:path with the folder on another machine")
    return RemoteFiles(host, folder)


class LocalFiles:
    """A folder of this machine, or one that is mounted.

    Raises:
        ConfigError: it is not there.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            state = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f"run folder {str(folder)!r} {state}; give the folder of a run, DIR/NAME")
        self.folder = folder
        self.name = folder.resolve().name
        self.problem: str | None = None

    def read(self, offsets: Mapping[str, int]) -> dict[str, Reading]:
        """See `Files`."""
        self.problem = None if self.folder.is_dir() else f"{self.folder} is not there any more"
        readings = {}
        for name, offset in offsets.items() if self.problem is None else ():
            try:
                with open(self.folder / name, "rb") as file:
                    status = os.fstat(file.fileno())
                    file.seek(offset)
                    age = max(time.time() - status.st_mtime, 0.0)
                    readings[name] = Reading(f"{status.st_dev}:{status.st_ino}", age, file.read())
            except FileNotFoundError:
                readings[name] = Reading(None)
            except OSError as error:  # a mount that has lost its server
                self.problem = f"{self.folder / name} cannot be read: {error.strerror}"
        return readings

    def close(self) -> None:
        """See `Files`."""


# Runs in the login shell's `sh`. For any login shell: one line, no single quote, no exclamation mark. It answers each
# line "NAME OFFSET" with "INODE TIME NOW", the file's bytes from there on, and the mark that it was given.
REMOTE = (
    "read -r mark; IFS= read -r folder; "
    'case $folder in "~"|"~/"*) folder=$HOME${folder#"~"};; -*) folder=./$folder;; esac; '
    'if [ -d "$folder" ]; then kind=folder; elif [ -e "$folder" ]; then kind=file; else kind=nothing; fi; '
    'printf "%s %s\\n" "$mark" "$kind"; '
    "while read -r name offset; do "
    'file=$folder/$name; known=-; if [ -f "$file" ]; then '
    'known=$(stat -c "%i %Y" "$file" 2>/dev/null || stat -f "%i %m" "$file" 2>/dev/null || echo file); '
    'elif [ -d "$folder" ]; then known=none; fi; '
    'printf "%s %s\\n" "$known" "$(date +%s)"; '
    'tail -c "+$((offset + 1))" "$file" 2>/dev/null; '
    'printf "\\n%s\\n" "$mark"; '
    "done"
)
KEEP_ALIVE = ("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
WAIT = 0.4  # seconds that one `read` waits for an answer at most
SILENCE = 30.0  # seconds without a byte of an answer, after which the connection counts as lost
LONGEST_PAUSE = 30  # seconds between two attempts to connect, at most


class RemoteFiles:
    """A folder of another machine, read by a shell there over one ssh connection; new bytes alone are sent.

    A connection that is lost is made again, with pauses. The first may ask for a password; the others may not, for
    they would ask in the middle of the picture.

    Raises:
        ConfigError: ssh does not get there, or the folder is not there.
    """

    def __init__(self, host: str, folder: str) -> None:
        self.host, self.folder = host, folder
        self.name = folder.rstrip("/").rsplit("/", 1)[-1] or folder
        self.problem: str | None = None
        self._pause, self._next_attempt = 1, 0.0
        self._asked: list[str] = []  # names of files whose answers are to come, in order
        self._connect()
        while self._kind is None:
            if not self._receive(WAIT, patient=True):
                raise ConfigError(f"run {host}:{folder} cannot be read: {self._farewell()}")
        if self._kind != "folder":
            self.close()
            state = "is a file" if self._kind == "file" else "does not exist"
            raise ConfigError(f"run folder {folder!r} on {host} {state}; give the folder of a run, DIR/NAME")

    def read(self, offsets: Mapping[str, int]) -> dict[str, Reading]:
        """See `Files`. Nothing, where the answer has not come yet: a later call then gives it.

        The offsets of a file must be the same until its answer has come.
        """
        if self._process is None:
            if time.monotonic() < self._next_attempt:
                return {}
            self._connect("-o", "BatchMode=yes")
        if self._kind is not None and not self._asked:
            self._asked = list(offsets)
            self._send("".join(f"{name} {offset}\n" for name, offset in offsets.items()))
        deadline = time.monotonic() + WAIT
        while self._answers() is None and (left := deadline - time.monotonic()) > 0:
            if not self._receive(left):
                self._lost(self._farewell())
                return {}
        answers = self._answers()
        if answers is None:
            return {}
        names, self._asked = self._asked, []
        self._buffer.clear()
        known = dict(zip(names, map(_reading, answers), strict=True))
        gone = any(reading is None for reading in known.values())
        self.problem = f"{self.host}:{self.folder} is not there any more" if gone else None
        return {name: reading for name, reading in known.items() if reading is not None}

    def close(self) -> None:
        """End the connection."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                pipe.close()
            self._process = None

    # ── The connection ──

    def _connect(self, *options: str) -> None:
        self._mark = secrets.token_hex(16)
        self._kind: str | None = None  # what the folder is; None before the shell there has said so
        self._buffer, self._asked = bytearray(), []
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        command = ["ssh", "-T", "-C", *KEEP_ALIVE, *options, self.host, f"exec sh -c {shlex.quote(REMOTE)}"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
            )
        except OSError as error:
            self._process = None
            raise ConfigError(
                f"run {self.host}:{self.folder} is read over ssh, which does not start: {error}"
            ) from None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = time.monotonic()
        self._send(f"{self._mark}\n{self.folder}\n")

    def _send(self, text: str) -> None:
        with suppress(BrokenPipeError):  # reading says why
            self._process.stdin.write(text.encode())

    def _receive(self, seconds: float, *, patient: bool = False) -> bool:
        """Wait for bytes; False where the connection has ended, or says nothing any more."""
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            return patient or time.monotonic() - self._heard < SILENCE
        data = self._process.stdout.read(1 << 20)
        if not data:
            return data is None
        self._heard = time.monotonic()
        self._buffer += data
        # What the login shell prints before the mark is no answer.
        while self._kind is None and (end := self._buffer.find(b"\n")) >= 0:
            line = self._buffer[:end].decode(errors="replace")
            del self._buffer[: end + 1]
            if line.startswith(f"{self._mark} "):
                self._kind = line.split(" ")[1]
                self._pause = 1
        return True

    def _answers(self) -> list[bytes] | None:
        """The answers to the last question; None where they are not all there."""
        end = f"\n{self._mark}\n".encode()
        if not self._asked or not self._buffer.endswith(end) or self._buffer.count(end) < len(self._asked):
            return None
        return bytes(self._buffer).split(end)[:-1]

    def _farewell(self) -> str:
        """Why the connection ended, in ssh's own words, and close it."""
        if self._process.poll() is None:
            self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        if said:
            return "".join(char if char.isprintable() else " " for char in f"ssh says: {said[-1]}")
        return f"no answer for {SILENCE:.0f} s" if status < 0 else f"ssh ended with status {status}"

    def _lost(self, why: str) -> None:
        self.problem = f"connection to {self.host} lost ({why}); trying again in {self._pause} s"
        self._next_attempt = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _reading(answer: bytes) -> Reading | None:
    """One answer of the shell there; None where the folder is gone."""
    head, _, data = answer.partition(b"\n")
    words = head.decode(errors="replace").split()
    if words[0] == "-":
        return None
    if words[0] == "none":
        return Reading(None)
    age = max(float(words[2]) - float(words[1]), 0.0) if len(words) == 3 else None
    return Reading(words[0], age, data)

"""Follows one process of gpu.py: takes its rows as they come, and ends it in time with all its children."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from gpu_watch import end_with_parent

from bapo_openrlhf.record.run_record import read_metrics

GRACE = 15.0  # seconds in which a process may end by itself after its last row, and its children after it
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STEP_LINE = re.compile(r"Global step (\d+): (\{.*\})")
SUBREAPER = 36  # of Linux's prctl: orphans of this process's children become its own children

Row = dict[str, Any]


def rows_of_record(folder: Path) -> list[Row]:
    """The steps that a run of this project has recorded so far."""
    return read_metrics(folder) if folder.exists() else []


def rows_of_lines(path: Path) -> list[Row]:
    """The whole lines of a file of JSON lines."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def rows_of_openrlhf(log: Path, responses: int) -> list[Row]:
    """The steps that OpenRLHF's own command has printed so far, with the names that this project's record has.

    Args:
        log: its output.
        responses: responses of a step. OpenRLHF trains on all of them.
    """
    text = log.read_text(errors="replace") if log.exists() else ""
    rows: dict[int, Row] = {}
    for number, status in STEP_LINE.findall(COLOURS.sub("", text)):
        row = ast.literal_eval(re.sub(r"\b(nan|-?inf)\b", "None", status))
        tokens = responses * row["response_length"]
        counts = {"rollouts/step": responses, "responses/trained": responses}
        counts |= {"tokens/generated": tokens, "tokens/trained": tokens, "reward/fresh_mean": row["reward"]}
        rows[int(number)] = {"step": int(number), **row, **counts}  # Ray may print a line twice
    return [rows[number] for number in sorted(rows)]


def adopt_orphans() -> None:
    """Let processes whose parent was ended become children of this process, so that it can find and end them."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[psutil.Process]:
    """The running processes below this one, without Ray's own and its workers that wait for work."""
    processes = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            rays = words.startswith("ray::IDLE") or "/ray/" in words
            if not rays and process.status() != psutil.STATUS_ZOMBIE:
                processes.add(process)
    return processes


def end(process: subprocess.Popen[bytes], before: set[psutil.Process]) -> None:
    """End a process, and those that came after `before` and do not end by themselves."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    over = time.monotonic() + GRACE
    while (left := descendants() - before) and time.monotonic() < over:
        time.sleep(0.2)
    for one in left:
        with suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(left, timeout=GRACE)


def follow(
    words: Sequence[str],
    log: Path,
    read: Callable[[], list[Row]],
    seen: Callable[[Row], None],
    *,
    wanted: int,
    left: Callable[[], float],
    patience: float,
    environment: Mapping[str, str],
) -> str:
    """Run a command until it has written all rows, has ended, or its time is over.

    Args:
        words: the command.
        log: the file for its output.
        read: returns the rows that it has written so far.
        seen: is called with each new row, which also has the time of its arrival: `end`, in seconds since 1970.
        wanted: number of rows.
        left: returns the seconds that are left for it.
        patience: seconds without a new row after which it is ended.
        environment: variables to add.

    Returns:
        Why there are fewer rows than wanted. Empty if there are as many.
    """
    before, count, last = descendants(), 0, time.monotonic()

    def take() -> None:
        nonlocal count, last
        for row in read()[count:]:
            seen({**row, "end": time.time()})
            count, last = count + 1, time.monotonic()

    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        try:
            while process.poll() is None and count < wanted and left() > 0 and time.monotonic() - last < patience:
                take()
                time.sleep(0.1)
            ended, over = process.poll() is not None, left() <= 0
            take()  # what came since the last look
            if count >= wanted:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(GRACE, max(left(), 0.0)))
                return ""
            if ended:
                return f"it ended with status {process.returncode}: {log.read_text(errors='replace')[-3000:]}"
            why = "the time was over" if over else f"there was no new step for {patience:.0f} s"
            return f"{why}; it was stopped after {count} of {wanted} steps"
        finally:
            end(process, before)

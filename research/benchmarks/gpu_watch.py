"""Looks at the GPUs in the background: how busy they are, and how much of their memory is in use."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, Self

PARTS = {  # parts of a step in their order, and their names in tables
    "generation": "generation",
    "reevaluation": "re-evaluation",
    "adapt": "the layer's batch",
    "make_experience": "experience",
    "ppo_train": "training",
    "broadcast": "weight sync",
}

PARENT_ENDS = 1  # of Linux's prctl: the signal that a process gets when its parent ends
_prctl = ctypes.CDLL(None).prctl


def end_with_parent() -> None:
    """In a new process: be killed when the parent is."""
    _prctl(PARENT_ENDS, signal.SIGKILL, 0, 0, 0)


def nvidia_smi(query: str, *more: str) -> list[str]:
    """The command that asks for these fields of each visible GPU, with sizes in MiB."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    return words + ([f"--id={visible}"] if visible else []) + list(more)


def cards() -> list[list[str]]:
    """Name, MiB and driver of each visible GPU."""
    words = nvidia_smi("name,memory.total,driver_version")
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines]


class Sample(NamedTuple):
    """A look at one GPU.

    Attributes:
        time: in seconds since 1970.
        busy: share of the last moments in which a kernel ran, from 0 to 1. None if the GPU does not tell.
        gib: memory in use.
    """

    time: float
    busy: float | None
    gib: float


def sample_of(line: str) -> Sample:
    """A line of `nvidia-smi --query-gpu=timestamp,utilization.gpu,memory.used`."""
    when, busy, mib = (cell.strip() for cell in line.split(","))
    time = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
    return Sample(time, float(busy) / 100 if busy.isdecimal() else None, float(mib) / 1024)


class Watch:
    """Within its block, nvidia-smi looks at the GPUs at equal intervals. Without a GPU, nobody looks.

    Args:
        gpu: whether there is one.
        milliseconds: from a look to the next.
    """

    def __init__(self, *, gpu: bool, milliseconds: int = 200) -> None:
        self.samples: list[Sample] = []
        self._words = nvidia_smi("timestamp,utilization.gpu,memory.used", f"--loop-ms={milliseconds}") if gpu else []

    def __enter__(self) -> Self:
        if self._words:
            ours, theirs = os.openpty()  # a program writes whole lines to a terminal, and blocks of lines to a pipe
            self._process = subprocess.Popen(
                self._words, stdout=theirs, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
            )
            os.close(theirs)
            threading.Thread(target=self._read, args=(ours,), daemon=True).start()
        return self

    def _read(self, ours: int) -> None:
        with suppress(OSError), open(ours) as lines:  # the read of a terminal fails when its program has ended
            for line in lines:
                with suppress(ValueError):
                    self.samples.append(sample_of(line))

    def __exit__(self, *_error: object) -> None:
        if self._words:
            self._process.kill()
            self._process.wait()

    def within(self, spans: Iterable[tuple[float, float]]) -> list[Sample]:
        """The samples of these spans of time (from, to)."""
        spans = list(spans)
        return [sample for sample in list(self.samples) if any(a <= sample.time <= b for a, b in spans)]

    def busy(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """The mean share of time in which the GPUs are busy in each part of these steps. None if nobody looked."""
        spans: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
        for row in rows:
            for part, span in spans_of(row).items():
                spans[part].append(span)
        result = {}
        for part, of_part in spans.items():
            shares = [sample.busy for sample in self.within(of_part) if sample.busy is not None]
            result[part] = sum(shares) / len(shares) if shares else None
        return result


def spans_of(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """When each part of a step began and ended, from the step's end backwards.

    The parts follow one another. The little time between them counts as the first part's.
    """
    spans, end = {}, row["end"]
    for part in reversed(PARTS):
        seconds = row.get(f"timing/{part}") or 0.0
        spans[part] = (end - seconds, end)
        end -= seconds
    return spans

"""Measure where the time of a few steps goes (`--run.profile_steps`).

    DIR/NAME/profile/calls.json.gz                    Ray's time line: each call of each process
    DIR/NAME/profile/{actor,critic,reference,reward}_rank*.json.gz, engine*_rank*.json.gz
                                                      torch's trace of each model process: operators, and GPU kernels
    DIR/NAME/profile/summary.md                       shares of the window, and the operators that took longest

The window is the time of the profiled steps. The traces are in Chrome's format, which Perfetto opens.
"""

import gzip
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

logger = logging.getLogger(__name__)

FOLDER = "profile"
WARM_UP = 2  # steps before the window, because the first steps have work that happens only once
OPERATORS = 12  # rows of each process in the summary


class Trace(NamedTuple):
    """What one process did.

    Attributes:
        process: File name of its trace without the ending.
        operators: Name, seconds without the operators that it calls, and number of calls; longest first.
    """

    process: str
    operators: list[tuple[str, float, int]]


def start_trace() -> Any:
    """Start torch's profiler in this process."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler


def stop_trace(profiler: Any, folder: str, process: str) -> Trace:
    """Stop the profiler, write FOLDER/PROCESS.json.gz and return the operators that took longest."""
    profiler.stop()
    profiler.export_chrome_trace(f"{folder}/{process}.json.gz")
    rows = []
    for event in profiler.key_averages():
        # On a GPU only the time of the kernel counts, because the CPU only launches it.
        seconds = (event.self_device_time_total or event.self_cpu_time_total) / 1e6
        rows.append((event.key, seconds, event.count))
    rows.sort(key=lambda row: -row[1])
    return Trace(process, rows[:OPERATORS])


def start_in_engine(worker: Any) -> None:
    """Start torch's profiler in a vLLM worker."""
    worker.profiler_of_run = start_trace()


def stop_in_engine(worker: Any, folder: str, engine: int) -> Trace:
    """Stop the profiler in a vLLM worker and write the trace of its rank."""
    return stop_trace(worker.profiler_of_run, folder, f"engine{engine}_rank{worker.rank}")


class Profile:
    """Starts and stops the traces of a run, from the trainer's process.

    Args:
        folder: Folder of the run's record.
        steps: Number of steps in the window; 0 means no profile.
        groups: OpenRLHF's actor groups by model; None for a model that the run does not have.
        engines: Rollout engines that can be profiled.
    """

    def __init__(self, folder: Path, steps: int, groups: Mapping[str, Any], engines: Sequence[Any]) -> None:
        self.folder, self.steps = folder / FOLDER, steps
        self.groups = {model: group for model, group in groups.items() if group is not None}
        self.engines = engines
        self.ended = 0  # steps since this process began
        self.since: float | None = None  # time.time() at the start of the window; None outside the window

    def step_ended(self) -> None:
        """Open or close the window. Call this after each step."""
        if not self.steps:
            return
        self.ended += 1
        if self.ended == WARM_UP:
            self._start()
        elif self.ended == WARM_UP + self.steps:
            self.finish()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for group in self.groups.values():
            ray.get(group.async_run_method(method_name="start_trace"))
        ray.get([engine.start_trace.remote() for engine in self.engines])
        self.since = time.time()

    def finish(self) -> None:
        """Close the window if it is open, and write the profile. The end of a run may close it early."""
        if self.since is None:
            return
        window, self.since = (self.since, time.time()), None
        folder = str(self.folder)
        traces: list[Trace] = []
        for model, group in self.groups.items():
            traces += ray.get(group.async_run_method(method_name="stop_trace", folder=folder, model=model))
        for number, engine in enumerate(self.engines):
            traces += ray.get(engine.stop_trace.remote(folder, number))
        calls = calls_within(ray_timeline(), *window)
        with gzip.open(self.folder / "calls.json.gz", "wt", encoding="utf-8") as file:
            json.dump(calls, file)
        steps = min(self.ended, WARM_UP + self.steps) - WARM_UP
        (self.folder / "summary.md").write_text(summary(window, steps, calls, traces), encoding="utf-8")
        logger.warning("profile of %d steps: %s", steps, self.folder / "summary.md")


def ray_timeline() -> list[dict[str, Any]]:
    """Ray's time line of all processes so far, as events in Chrome's format with ts and dur in microseconds."""
    time.sleep(2)  # because workers report their calls to Ray's server about once a second
    return ray.timeline()


def calls_within(events: Iterable[dict[str, Any]], start: float, end: float) -> list[dict[str, Any]]:
    """The events with a duration that overlap the window, cut to the window.

    Args:
        events: Events in Chrome's format.
        start: Start of the window in seconds since the epoch.
        end: End of the window in seconds since the epoch.
    """
    within = []
    for event in events:
        if event.get("ph") != "X":
            continue
        first, last = max(event["ts"], start * 1e6), min(event["ts"] + event["dur"], end * 1e6)
        if first < last:
            within.append({**event, "ts": first, "dur": last - first})
    return within


def busy_seconds(calls: Iterable[dict[str, Any]]) -> dict[str, float]:
    """For each name, the seconds in which any process was running a call of this name; longest first."""
    spans = defaultdict(list)
    for call in calls:
        spans[call["name"]].append((call["ts"], call["ts"] + call["dur"]))
    busy = {}
    for name, found in spans.items():
        total, reached = 0.0, float("-inf")
        for first, last in sorted(found):
            total += max(0.0, last - max(first, reached))
            reached = max(reached, last)
        busy[name] = total / 1e6
    return dict(sorted(busy.items(), key=lambda item: -item[1]))


def summary(window: tuple[float, float], steps: int, calls: Sequence[dict[str, Any]], traces: Sequence[Trace]) -> str:
    """The page of shares, in Markdown."""
    seconds = window[1] - window[0]
    each = f", {seconds / steps:.3g} s each" if steps else ""
    lines = [
        f"# Profile of {steps} steps",
        "",
        f"{seconds:.3g} s{each}. Profiling itself takes a part of this time. Open the `.json.gz` files next to this "
        "page in Perfetto, or in Chrome's tracing.",
        "",
        "## Calls of processes",
        "",
        "Share of the window in which a call of that name was running in any process. Calls nest and overlap.",
        "",
        "| call | seconds | share |",
        "| --- | --- | --- |",
    ]
    for name, busy in list(busy_seconds(calls).items())[:20]:
        lines.append(f"| `{name}` | {busy:.3f} | {busy / seconds:.1%} |")
    for trace in traces:
        lines += ["", f"## {trace.process}", "", "| operator | seconds in itself | share | calls |"]
        lines.append("| --- | --- | --- | --- |")
        for name, own, count in trace.operators:
            lines.append(f"| `{name}` | {own:.3f} | {own / seconds:.1%} | {count} |")
    return "\n".join(lines) + "\n"

"""Runs the runs of a study: several at a time, each as `bapo-openrlhf train` in a process of its own, with bars.

The folder OUT/runs/ARM-sSEED/ holds the record of one run and its output (output.log). A run is done when it has a
summary.json. The same command continues a study that was stopped: a run that was interrupted continues from its last
checkpoint, which a signal saves too, and without one it starts again.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.settings import Settings, changes
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.outcome import UNTRAINED
from bapo_openrlhf.workbench.pages.text import duration
from bapo_openrlhf.workbench.study.definition import SAME_WAYS, Arm, Study

RUNS = "runs"
OUTPUT = "output.log"
POLL = 0.5  # seconds between two looks at the running processes
TRAIN = ("-m", "bapo_openrlhf.cli", "train")  # arguments of Python


@dataclass(frozen=True)
class Planned:
    """A run of the study, with its command line after `bapo-openrlhf train`."""

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
        """Whether the run has ended well."""
        return (self.folder / record.SUMMARY).exists()


Callback = Callable[[Sequence[Planned], Sequence[Planned]], None]  # the running runs, and those that have just ended


@dataclass
class Outcome:
    """How a call of `run_all` ended."""

    done: int = 0  # runs that are done, including those of earlier calls
    failed: list[str] = field(default_factory=list)  # names of runs that ended in this call without being done
    left: int = 0  # runs that were not started because time ran out


def plan(study: Study, out: Path) -> list[Planned]:
    """All runs of a study, in order."""
    runs = []
    for arm, seed in study.runs:
        folder = out / RUNS / f"{arm.name}-s{seed}"
        place = {
            "run.dir": folder.parent,
            "run.name": folder.name,
            "run.logs": "progress",
            "ckpt.path": folder / record.CHECKPOINTS,
            "ckpt.output_dir": folder / record.MODEL,
        }
        words = [*study.words(arm, seed), *(f"--{name}={value}" for name, value in place.items())]
        runs.append(Planned(arm, seed, folder, (*words, "--ckpt.load_enable")))
    return runs


def require_same(run: Planned, now: Settings) -> None:
    """Raise ConfigError if a run was begun with other settings. The seed is not compared: `now` may have another's."""
    before = record.read_run(run.folder)
    if "config" not in before:
        return
    old, new = before["config"], now["config"]
    compared = changes(before, now) | {name: (old[name], new[name]) for name in SAME_WAYS if name in old}
    differences = ", ".join(
        f"{flag} {was} (now {becomes})"
        for flag, (was, becomes) in compared.items()
        if was != becomes and flag != "train.seed"
    )
    if differences:
        names = ", ".join(Path(word).name for word in run.words if word.endswith((".yaml", ".yml")))
        files = f"; its files are {names}" if names else ""
        raise ConfigError(
            f"study: run {run.name} in {run.folder.parent} was started with {differences}{files}; give another "
            "--output, or delete that run's folder"
        )


def require_steps(args: SimpleNamespace) -> None:
    """Raise ConfigError if a run would leave no record of its steps."""
    if args.train.async_enable and not args.adapt.enabled:
        raise ConfigError(
            "train.async_enable is True; here it needs batch adaptation (adapt.method must not be none), because "
            "OpenRLHF's own asynchronous trainer leaves no record of its steps"
        )


def run_all(
    runs: Sequence[Planned],
    *,
    parallel: int,
    environment: dict[str, str],
    until: float | None,
    callback: Callback = lambda running, ended: None,
) -> Outcome:
    """Run every run that is not done, in order and several at a time; start none after `until` (`time.monotonic()`).

    `callback` is called every POLL seconds with the running runs and those that ended since the last call.
    """
    outcome = Outcome(done=sum(run.done for run in runs))
    queue = [run for run in runs if not run.done]
    running: list[tuple[Planned, subprocess.Popen[bytes]]] = []
    try:
        while queue or running:
            late = until is not None and time.monotonic() > until
            while queue and len(running) < parallel and not late:
                run = queue.pop(0)
                running.append((run, _start(run, environment)))
            ended = [(run, process) for run, process in running if process.poll() is not None]
            running = [one for one in running if one not in ended]
            for run, process in ended:
                if process.returncode in (0, UNTRAINED) and run.done:
                    outcome.done += 1
                else:
                    outcome.failed.append(run.name)
            callback([run for run, _ in running], [run for run, _ in ended])
            if late and not running:
                outcome.left = len(queue)
                break
            time.sleep(POLL)
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()
    return outcome


def _start(run: Planned, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            [machine.python(), *TRAIN, *run.words],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


# ── progress ──


@contextmanager
def on_terminal(name: str, steps: Mapping[str, int], planned: Sequence[Planned]) -> Iterator[Callback]:
    """The callback for `run_all`: a line when a run ends, and bars. `steps` has the steps of each run."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(
        *columns, TextColumn("{task.fields[note]}", markup=False), console=console, disable=not console.is_terminal
    )
    done = {run.name for run in planned if run.done}
    before = {run.name: steps[run.name] if run.done else _lines_of(run) for run in planned}  # steps of earlier calls
    total, start = sum(steps.values()), time.monotonic()
    with bars:
        whole = bars.add_task(name, total=total, note="")
        tasks: dict[str, TaskID] = {}

        def draw(running: Sequence[Planned], ended: Sequence[Planned]) -> None:
            done.update(run.name for run in ended if run.done)
            counts = {run.name: _lines_of(run) for run in running}
            before.update({run: min(before[run], count) for run, count in counts.items()})  # it repeats some of them
            completed = sum((before | counts | {run: steps[run] for run in done}).values())
            time_left = "time left: not known yet"
            if (made := completed - sum(before.values())) > 0:
                seconds = (time.monotonic() - start) / made * (total - completed)
                time_left = f"{duration(round(seconds))} left"
            runs = f"{len(done)}/{len(planned)} runs"
            for run in ended:
                text = f"{name}: {runs}, {time_left}; {_end_of(run)}"
                bars.console.print(text, soft_wrap=True, highlight=False, markup=False)
            for run in set(tasks) - set(counts):
                bars.remove_task(tasks.pop(run))
            for run, count in counts.items():
                if run not in tasks:
                    tasks[run] = bars.add_task(run, total=steps[run], note="")
                bars.update(tasks[run], completed=count)
            bars.update(whole, completed=completed, note=f"steps; {runs}; {time_left}")

        yield draw


def _end_of(run: Planned) -> str:
    if not run.done:
        return f"{run.name}: failed; its output is in {run.folder}"
    try:
        summary = record.read_summary(run.folder)
    except ConfigError as error:
        return f"{run.name}: {error}"
    reward = " to ".join(f"{summary.get(key) or 0:.3f}" for key in ("reward_start", "reward_end"))
    seconds = summary.get("seconds", {}).get("step_total")
    return f"{run.name}: reward {reward}" + (f"; its steps took {duration(seconds)}" if seconds else "")


def _lines_of(run: Planned) -> int:
    file = run.folder / record.METRICS
    return file.read_bytes().count(b"\n") if file.exists() else 0

"""Runs the runs of a study: several at a time, each as `bapo-openrlhf train` in a process of its own, with bars.

The folder OUT/runs/ARM-sSEED/ holds the record of one run, its command (command.json) and its output (output.log). A
run is done when it has a summary.json. The same command continues a study that was stopped: a run that was interrupted
continues from its last checkpoint, which a signal saves too, and without one it starts again.
"""

import json
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
from bapo_openrlhf.workbench.study.definition import Arm, Study

RUNS = "runs"
COMMAND = "command.json"
OUTPUT = "output.log"
PLACE = ("--run.dir=", "--ckpt.path=", "--ckpt.output_dir=")  # flags that say where a run's files lie
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


@dataclass
class Running:
    planned: Planned
    process: subprocess.Popen[bytes]


Callback = Callable[[Sequence[Running], Sequence[Planned]], None]  # the running runs, and those that have just ended


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


def require_same(runs: Sequence[Planned]) -> None:
    """Raise ConfigError if a run was started before with other flags. The place of its files may differ."""
    for run in runs:
        if not (run.folder / COMMAND).exists():
            continue
        before, now = map(_without_place, (_words_in(run.folder / COMMAND), run.words))
        if [*map(_in_one_form, before)] != [*map(_in_one_form, now)]:
            old_words = " ".join(word for word in before if word not in now) or "fewer flags"
            new_words = " ".join(word for word in now if word not in before) or "no such flag"
            raise _other_start(run, f"{old_words}, but now has {new_words}")


def require_same_settings(run: Planned, now: Settings) -> None:
    """Raise ConfigError if a run's files give other settings now. `require_same` compares the flags of its words."""
    before = record.read_run(run.folder)
    if "config" not in before:
        return
    flags = {word.removeprefix("--").partition("=")[0] for word in run.words if word.startswith("--")}
    differences = ", ".join(
        f"{flag} {old} (now {new})"
        for flag, (old, new) in changes(before, now).items()
        if flag in before.get("inputs", {}) or flag not in flags
    )
    if differences:
        names = ", ".join(Path(word).name for word in run.words if word.endswith((".yaml", ".yml")))
        raise _other_start(run, differences + (f"; its files are {names}" if names else ""))


def require_steps(args: SimpleNamespace) -> None:
    """Raise ConfigError if a run would leave no record of its steps."""
    if args.train.async_enable and not args.adapt.enabled:
        raise ConfigError(
            "train.async_enable is True; here it needs batch adaptation (adapt.method must not be none), because "
            "OpenRLHF's own asynchronous trainer leaves no record of its steps"
        )


def _other_start(run: Planned, words: str) -> ConfigError:
    return ConfigError(
        f"study: run {run.name} in {run.folder.parent} was started with {words}; give another --output, or delete that "
        "run's folder"
    )


def _words_in(file: Path) -> list[str]:
    try:
        words = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"study: {file} is no run's command; delete that run's folder")
    return words


def _without_place(words: Sequence[str]) -> list[str]:
    """A run's words without the place of its files, and files by their names, because folders may be moved."""
    return [Path(word).name if word.startswith("/") else word for word in words if not word.startswith(PLACE)]


def _in_one_form(word: str) -> str:
    """A flag as it is compared: 1.0e-4 is 0.0001, and a switch that is true is a switch alone."""
    name, _, value = word.removesuffix("=true").partition("=")
    try:
        return f"{name}={float(value)}"
    except ValueError:
        return word.removesuffix("=true")


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
    running: list[Running] = []
    try:
        while queue or running:
            late = until is not None and time.monotonic() > until
            while queue and len(running) < parallel and not late:
                running.append(_start(queue.pop(0), environment))
            ended = [run for run in running if run.process.poll() is not None]
            running = [run for run in running if run not in ended]
            for run in ended:
                if run.process.returncode in (0, UNTRAINED) and run.planned.done:
                    outcome.done += 1
                else:
                    outcome.failed.append(run.planned.name)
            callback(running, [run.planned for run in ended])
            if late and not running:
                outcome.left = len(queue)
                break
            time.sleep(POLL)
    finally:
        for run in running:
            run.process.terminate()
        for run in running:
            run.process.wait()
    return outcome


def _start(run: Planned, environment: dict[str, str]) -> Running:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / COMMAND).write_text(json.dumps(run.words, indent=2) + "\n", encoding="utf-8")
    with (run.folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [machine.python(), *TRAIN, *run.words],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    return Running(run, process)


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

        def draw(running: Sequence[Running], ended: Sequence[Planned]) -> None:
            done.update(run.name for run in ended if run.done)
            counts = {one.planned.name: _lines_of(one.planned) for one in running}
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

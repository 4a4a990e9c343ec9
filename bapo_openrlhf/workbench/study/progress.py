"""The progress of a study on the terminal: one bar for the whole study, and one for each run that is going on."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.text import duration
from bapo_openrlhf.workbench.study.runner import Planned, Running


class Watching:
    """Counts the steps of all runs and estimates the time left from the speed so far.

    Args:
        name: The study's name.
        steps: Number of trainer steps of each run, by the run's name.
        planned: All runs of the study.
    """

    def __init__(self, name: str, steps: Mapping[str, int], planned: Sequence[Planned]) -> None:
        self.name = name
        self.steps = steps
        self.total = sum(steps.values())
        self.runs = len(planned)
        self.done = {run.name for run in planned if run.done}
        self.before = sum(steps[name] for name in self.done)
        self.began = time.monotonic()

    def made(self, running: Sequence[Running]) -> dict[str, int]:
        """Number of steps that each of the running runs has made, by the run's name."""
        return {one.planned.name: _lines_of(one.planned) for one in running}

    def completed(self, made: Mapping[str, int]) -> int:
        """Number of steps of all runs so far."""
        return sum(self.steps[name] for name in self.done) + sum(made.values())

    def left(self, completed: int) -> str:
        """The time that the remaining steps will take, in words."""
        fresh = completed - self.before
        if fresh < 1:
            return "time left: not known yet"
        return f"{duration(round((time.monotonic() - self.began) / fresh * (self.total - completed)))} left"

    def end(self, ended: Sequence[Planned]) -> list[str]:
        """Count the runs that have ended, and return one line about each."""
        lines = []
        for run in ended:
            if run.done:
                self.done.add(run.name)
                summary = record.read_summary(run.folder)
                reward = " to ".join(f"{summary.get(key) or 0:.3f}" for key in ("reward_start", "reward_end"))
                lines.append(f"{run.name}: reward {reward}, {duration(summary['seconds']['whole_run'])}")
            else:
                lines.append(f"{run.name}: failed; its output is in {run.folder}")
        return lines


def _lines_of(run: Planned) -> int:
    """Number of whole lines in the run's metrics: one per trainer step."""
    file = run.folder / record.METRICS
    return file.read_bytes().count(b"\n") if file.exists() else 0


@contextmanager
def on_terminal(watching: Watching) -> Iterator[object]:
    """The callback for `runner.run_all`: it prints a line when a run ends, and draws bars on a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=console, disable=not console.is_terminal)
    with bars:
        whole = bars.add_task(watching.name, total=watching.total, note="")
        tasks: dict[str, TaskID] = {}

        def draw(running: Sequence[Running], ended: Sequence[Planned]) -> None:
            lines, made = watching.end(ended), watching.made(running)
            completed = watching.completed(made)
            runs, left = f"{len(watching.done)}/{watching.runs} runs", watching.left(completed)
            for line in lines:
                bars.console.print(
                    f"{watching.name}: {runs}, {left}; {line}", soft_wrap=True, highlight=False, markup=False
                )
            for name in set(tasks) - set(made):
                bars.remove_task(tasks.pop(name))
            for name, steps in made.items():
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=watching.steps[name], note="")
                bars.update(tasks[name], completed=steps)
            bars.update(whole, completed=completed, note=f"steps; {runs}; {left}")

        yield draw

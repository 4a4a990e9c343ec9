"""A study on the terminal: a bar for all of it with the time left, and one for each run that goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.follow import Follower
from bapo_openrlhf.workbench.study.runner import Planned, Running


class Watching:
    """Counts steps, and says how long the rest will take at the speed so far.

    Args:
        steps: trainer steps of each run, by name.
        planned: all runs.
    """

    def __init__(self, name: str, steps: Mapping[str, int], planned: Sequence[Planned]) -> None:
        self.name = name
        self.steps = steps
        self.total = sum(steps.values())
        self.runs = len(planned)
        self.done = {run.name for run in planned if run.done}
        self.before = sum(steps[name] for name in self.done)
        self.began = time.monotonic()
        self._followers: dict[str, Follower] = {}

    def made(self, running: Sequence[Running]) -> dict[str, int]:
        """Steps that each of the running runs has made."""
        counts = {}
        for one in running:
            follower = self._followers.setdefault(one.planned.name, Follower(one.planned.folder))
            follower.poll()
            counts[one.planned.name] = len(follower.rows)
        return counts

    def completed(self, made: Mapping[str, int]) -> int:
        """Steps of all runs so far."""
        return sum(self.steps[name] for name in self.done) + sum(made.values())

    def left(self, completed: int) -> str:
        """Time for the rest, in words."""
        fresh = completed - self.before
        if fresh < 1:
            return "time left: not known yet"
        minutes = (time.monotonic() - self.began) / fresh * (self.total - completed) / 60
        return f"{minutes / 60:.1f} h left" if minutes >= 90 else f"{minutes:.0f} min left"

    def end(self, ended: Sequence[Planned]) -> list[str]:
        """Note runs that have ended; a line on each."""
        lines = []
        for run in ended:
            self._followers.pop(run.name, None)
            if run.done:
                self.done.add(run.name)
                summary = record.read_summary(run.folder)
                reward = " to ".join(f"{summary.get(key) or 0:.3f}" for key in ("reward_start", "reward_end"))
                lines.append(f"{run.name}: reward {reward}, {summary['seconds']['whole_run']:.0f} s")
            else:
                lines.append(f"{run.name}: failed; its output is in {run.folder}")
        return lines


@contextmanager
def on_terminal(watching: Watching) -> Iterator[object]:
    """What `runner.run_all` calls: bars on a terminal, else a line for each run that ends."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:

        def line(running: Sequence[Running], ended: Sequence[Planned]) -> None:
            for text in watching.end(ended):
                completed = watching.completed(watching.made(running))
                print(
                    f"{watching.name}: {len(watching.done)}/{watching.runs} runs, {watching.left(completed)}; {text}",
                    file=sys.stderr,
                    flush=True,
                )

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars:
        whole = bars.add_task(watching.name, total=watching.total, note="")
        tasks: dict[str, TaskID] = {}

        def draw(running: Sequence[Running], ended: Sequence[Planned]) -> None:
            for text in watching.end(ended):
                bars.console.print(text)
            made = watching.made(running)
            for name in set(tasks) - set(made):
                bars.remove_task(tasks.pop(name))
            for name, steps in made.items():
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=watching.steps[name], note="")
                bars.update(tasks[name], completed=steps)
            completed = watching.completed(made)
            note = f"steps; {len(watching.done)}/{watching.runs} runs; {watching.left(completed)}"
            bars.update(whole, completed=completed, note=note)

        yield draw

"""The progress of a study on the terminal: one bar for the whole study, and one for each run that is going on."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.text import duration
from bapo_openrlhf.workbench.study.runner import Planned, Running

Draw = Callable[[Sequence[Running], Sequence[Planned]], None]  # the running runs, and those that have just ended


@contextmanager
def on_terminal(name: str, steps: Mapping[str, int], planned: Sequence[Planned]) -> Iterator[Draw]:
    """The callback for `runner.run_all`: a line when a run ends, and bars. `steps` has the steps of each run."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(
        *columns, TextColumn("{task.fields[note]}", markup=False), console=console, disable=not console.is_terminal
    )
    done = {run.name for run in planned if run.done}
    before, total, began = sum(steps[run] for run in done), sum(steps.values()), time.monotonic()
    with bars:
        whole = bars.add_task(name, total=total, note="")
        tasks: dict[str, TaskID] = {}

        def draw(running: Sequence[Running], ended: Sequence[Planned]) -> None:
            done.update(run.name for run in ended if run.done)
            counts = {one.planned.name: _lines_of(one.planned) for one in running}
            completed = sum(steps[run] for run in done) + sum(counts.values())
            left = "time left: not known yet"
            if completed > before:
                seconds = (time.monotonic() - began) / (completed - before) * (total - completed)
                left = f"{duration(round(seconds))} left"
            runs = f"{len(done)}/{len(planned)} runs"
            for run in ended:
                text = f"{name}: {runs}, {left}; {_end_of(run)}"
                bars.console.print(text, soft_wrap=True, highlight=False, markup=False)
            for gone in set(tasks) - set(counts):
                bars.remove_task(tasks.pop(gone))
            for run, count in counts.items():
                if run not in tasks:
                    tasks[run] = bars.add_task(run, total=steps[run], note="")
                bars.update(tasks[run], completed=count)
            bars.update(whole, completed=completed, note=f"steps; {runs}; {left}")

        yield draw


def _end_of(run: Planned) -> str:
    if not run.done:
        return f"{run.name}: failed; its output is in {run.folder}"
    summary = record.read_summary(run.folder)
    reward = " to ".join(f"{summary.get(key) or 0:.3f}" for key in ("reward_start", "reward_end"))
    return f"{run.name}: reward {reward}; its steps took {duration(summary['seconds']['step_total'])}"


def _lines_of(run: Planned) -> int:
    file = run.folder / record.METRICS
    return file.read_bytes().count(b"\n") if file.exists() else 0

"""Shows one progress bar for a run and sends the run's own output to a file."""

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bapo_openrlhf.adapt.vocabulary import SOURCES, shown_sources
from bapo_openrlhf.errors import Ended
from bapo_openrlhf.record.follow import Follower
from bapo_openrlhf.record.run_record import REWARD, read_evaluations, read_warnings, scores_in_words

LOG = "train.log"
_ERROR = re.compile(r"[\w.]+(?:Error|Exception): \S.*")  # the last line of a traceback of Python


@contextmanager
def progress_bar(folder: Path, total_steps: int | None, title: str) -> Iterator[None]:
    """Show the steps of a run on the terminal, and send all output of this process and Ray's workers to train.log.

    Each warning and each evaluation is shown once; without a terminal a line is printed now and then. If the block
    fails, the end of its log is printed with the errors that it names, because another process may have the first one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    terminal = os.fdopen(os.dup(saved[1]), "w", encoding="utf-8", errors="replace")
    log = (folder / LOG).open("ab")
    log_start = log.tell()
    # What a run that is resumed has said before.
    old_lines = {row["text"] for row in read_warnings(folder)} | {*map(_held_out, read_evaluations(folder))}
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, total_steps, title, terminal, old_lines, stop), daemon=True)
    watcher.start()
    failed = False
    try:
        yield
    except BaseException as error:
        failed = not isinstance(error, Ended)
        raise
    finally:
        stop.set()
        watcher.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        log.close()
        if failed:
            lines = (folder / LOG).read_bytes()[log_start:].decode(errors="replace").splitlines()
            errors = _errors(lines)
            notes = ["", "It names these errors, the oldest first:", *errors] if errors else []
            where = f"the run failed; its whole output is in {folder / LOG}"
            terminal.write("\n".join(["", *lines[-30:], "", where, *notes, ""]))
        terminal.close()
        for descriptor in saved:
            os.close(descriptor)


def _errors(lines: Sequence[str]) -> list[str]:
    """The last five different errors of Python that are named in a log. Ray's own errors only repeat others."""
    errors = [match[0][:300] for line in lines if "ray::" not in line and (match := _ERROR.search(line))]
    return list(dict.fromkeys(errors))[-5:]


def _watch(
    folder: Path, total: int | None, title: str, terminal: TextIO, old_lines: set[str], stop: threading.Event
) -> None:
    """Draw the bar, and print what is not in `old_lines`. Without a terminal, print about ten lines instead of it."""
    console = Console(file=terminal)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    every, printed_steps, note = max((total or 100) // 10, 1), 0, "starting Ray, DeepSpeed and vLLM"
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, note=note)
        if not console.is_terminal:
            print(f"{title}: {note}", file=terminal, flush=True)
        run, is_last = Follower(folder), False
        while not is_last:
            is_last = stop.wait(0.5)  # once the run has ended, there is one look more
            run.poll()
            rows = run.rows
            lines = {row["text"]: f"warning: {row['text']}" for row in run.warnings}
            lines |= {text: text for text in map(_held_out, run.evaluations)}
            for text in [text for text in lines if text not in old_lines]:
                console.print(lines[text], markup=False, highlight=False, soft_wrap=True)
            old_lines |= lines.keys()
            if rows:
                bar.update(task, completed=len(rows), note=_note(rows[-1]))
            news = len(rows) - printed_steps
            if not console.is_terminal and (news >= every or (is_last and news > 0)):
                printed_steps = len(rows)
                print(f"{title}: step {printed_steps}/{total or '?'}, {_note(rows[-1])}", file=terminal, flush=True)


def _held_out(row: Mapping[str, Any]) -> str:
    return f"step {row['step']}: held-out {scores_in_words(row) or 'evaluation without a score'}"


def _note(row: Mapping[str, Any]) -> str:
    counts = {source: int(row.get(f"groups/{source}") or 0) for source in SOURCES}
    groups = "+".join(str(counts[source]) for source in shown_sources(counts))
    return f"reward {row.get(REWARD) or 0:.3f}, groups {groups}"

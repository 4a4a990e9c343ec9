"""`bapo-openrlhf watch`: a run in the terminal while it goes on, here or on another machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bapo_openrlhf.errors import RunError, refuse
from bapo_openrlhf.record.follow import Follower, open_run
from bapo_openrlhf.workbench.watch import ASCII, UNICODE, Seen, picture, step_line, warnings

TICK = 0.5  # seconds between two looks


def main(argv: Sequence[str], prog: str = "bapo-openrlhf watch") -> int:
    """Parse, watch until the run has ended or Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show a run in the terminal while it goes on: progress, reward curve, batches, buffers, rates. "
        "Ends with the run, or with Ctrl-C. Where the output is no terminal, with TERM=dumb and with NO_COLOR: one "
        "picture in ASCII, then a line a step.",
        allow_abbrev=False,
    )
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("run", metavar="RUN", help="folder of the run, or [user@]host:folder, which is read over ssh")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    args = parser.parse_args(list(argv))

    console = Console(highlight=False)
    if is_plain(console):
        console = Console(highlight=False, color_system=None)
    files = None
    try:
        files = open_run(args.run)
        follower = Follower(files)
        if args.once:
            _once(follower, console)
        elif is_plain(console):
            _lines(follower, console)
        else:
            _live(follower, console)
    except KeyboardInterrupt:
        pass
    finally:
        if files is not None:
            files.close()
    return 0


def is_plain(console: Console) -> bool:
    """Whether the output is for ASCII without colours, line by line."""
    return not console.is_terminal or console.is_dumb_terminal or bool(os.environ.get("NO_COLOR"))


def seen_by(follower: Follower) -> Seen:
    """What the follower knows."""
    notes = [follower.files.problem] if follower.files.problem else []
    if follower.broken:
        notes.append(f"{follower.broken} lines of metrics.jsonl are no rows, and are left out")
    return Seen(follower.files.name, follower.rows, follower.run, follower.summary, follower.age, notes)


def _picture(follower: Follower, console: Console, *, whole: bool) -> Text:
    signs = ASCII if is_plain(console) or console.options.ascii_only else UNICODE
    return picture(seen_by(follower), console.width, None if whole else console.height - 1, signs)


def _once(follower: Follower, console: Console) -> None:
    while not follower.ready:
        follower.poll()
        if follower.files.problem:
            raise RunError(follower.files.problem)
    console.print(_picture(follower, console, whole=True))


def _live(follower: Follower, console: Console) -> None:
    """Drawn over itself in place: no alternate screen, so the last picture stays."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        ended = False
        while not ended:
            start = time.monotonic()
            follower.poll()
            ended = seen_by(follower).ended
            live.update(_picture(follower, console, whole=False), refresh=True)
            if not ended:
                time.sleep(max(TICK - (time.monotonic() - start), 0.05))


def _lines(follower: Follower, console: Console) -> None:
    """A picture, then what is new: steps, warnings, a resume, the end."""
    shown: int | None = None  # steps; None before the picture
    said: set[str] = set()
    while True:
        follower.poll()
        seen = seen_by(follower)
        if shown is None:
            if not follower.ready:
                time.sleep(TICK)
                continue
            console.print(_picture(follower, console, whole=True))
            said.update(_kind(text) for text in warnings(seen))
        else:
            if len(seen.rows) < shown:
                _say(console, f"goes on after step {seen.rows[-1]['step'] if seen.rows else 0}")
                shown = len(seen.rows)
            for count in range(shown + 1, len(seen.rows) + 1):
                _say(console, step_line(Seen(seen.name, seen.rows[:count], seen.run, {})))
            for text in warnings(seen):
                if _kind(text) not in said:
                    _say(console, f"! {text}")
            said = {_kind(text) for text in warnings(seen)}
            if seen.ended:
                _say(console, "finished")
        shown = len(seen.rows)
        if seen.ended:
            return
        time.sleep(TICK)


def _kind(text: str) -> str:
    """A warning without its numbers: it is said once, not at every change."""
    return "".join(char for char in text if not char.isdigit())


def _say(console: Console, text: str) -> None:
    console.print(text.encode("ascii", "replace").decode(), markup=False, soft_wrap=True)


if __name__ == "__main__":
    from bapo_openrlhf.cli.main import run

    sys.exit(run(["watch", *sys.argv[1:]]))

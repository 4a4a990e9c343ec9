"""`bapo-openrlhf watch`: shows a run in the terminal while it goes on."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.record.follow import Follower, Seen
from bapo_openrlhf.record.run_record import METRICS, RUN, no_run
from bapo_openrlhf.workbench.terminal import ASCII, UNICODE
from bapo_openrlhf.workbench.watch import picture, step_line, warnings

TICK = 0.5  # seconds between two looks at the record


def main(argv: Sequence[str], prog: str = "bapo-openrlhf watch") -> int:
    """Parse the flags, then watch until the run has ended or Ctrl-C is pressed."""
    parser = Parser(
        prog,
        "Show a run in the terminal while it goes on: progress, reward curve, batches, buffers, rates. "
        "The command ends with the run, or with Ctrl-C. If the output is not a terminal, if TERM is dumb, or if "
        "NO_COLOR is set, it prints one picture in ASCII, then one line per step.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run on this machine")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    args = parser.parse_args(argv)
    if args.run.is_dir() and not any((args.run / name).exists() for name in (RUN, METRICS)):
        raise ConfigError(no_run(args.run))

    console = Console(highlight=False)
    if is_plain(console):
        console = Console(highlight=False, color_system=None)
    try:
        follower = Follower(args.run)
        if args.once:
            follower.poll()
            if follower.problem:
                raise RunError(follower.problem)
            console.print(_picture(follower, console, whole=True))
        elif is_plain(console):
            _lines(follower, console)
        else:
            _live(follower, console)
    except KeyboardInterrupt:
        pass
    return 0


def is_plain(console: Console) -> bool:
    """Whether to print ASCII without colours, line by line."""
    return not console.is_terminal or console.is_dumb_terminal or bool(os.environ.get("NO_COLOR"))


def _picture(follower: Follower, console: Console, *, whole: bool) -> Text:
    signs = ASCII if is_plain(console) or console.options.ascii_only else UNICODE
    return picture(follower, console.width, None if whole else console.height - 1, signs)


def _live(follower: Follower, console: Console) -> None:
    """Redraw the picture in place. There is no alternate screen, so the last picture stays."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            start = time.monotonic()
            follower.poll()
            live.update(_picture(follower, console, whole=False), refresh=True)
            if follower.ended:
                return
            time.sleep(max(TICK - (time.monotonic() - start), 0.05))


def _lines(follower: Follower, console: Console) -> None:
    """Print one picture, then what is new: steps, warnings, a resume, the end."""
    follower.poll()
    console.print(_picture(follower, console, whole=True))
    while not follower.ended:
        shown, said = len(follower.rows), {_kind(text) for text in warnings(follower)}
        time.sleep(TICK)
        follower.poll()
        rows = follower.rows
        if len(rows) < shown:
            _say(console, f"goes on after step {rows[-1]['step'] if rows else 0}")
            shown = len(rows)
        for count in range(shown + 1, len(rows) + 1):
            _say(console, step_line(Seen(follower.name, rows[:count], follower.run)))
        for text in warnings(follower):
            if _kind(text) not in said:
                _say(console, f"! {text}")
        if follower.ended:
            _say(console, "finished")


def _kind(text: str) -> str:
    """A warning without its numbers, so that it is printed once and not at every change."""
    return "".join(char for char in text if not char.isdigit())


def _say(console: Console, text: str) -> None:
    console.print(text.encode("ascii", "replace").decode(), markup=False, soft_wrap=True)

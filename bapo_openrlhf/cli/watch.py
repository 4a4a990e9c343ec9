"""`bapo-openrlhf watch`: show a run in the terminal while it goes on.

It shows progress, reward curve, batches, buffers and rates. The command ends with the run, or with Ctrl-C. If the
output is not a terminal, it prints one picture.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.record.follow import Follower
from bapo_openrlhf.record.run_record import METRICS, RUN, no_run
from bapo_openrlhf.workbench.pages.text import printable
from bapo_openrlhf.workbench.watch import picture

TICK = 0.5  # seconds between two looks at the record


def main(argv: Sequence[str], prog: str = "bapo-openrlhf watch") -> int:
    """Parse the flags, then watch until the run has ended or Ctrl-C is pressed."""
    parser = Parser(prog, __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run on this machine")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    once = args.once or not console.is_terminal or console.is_dumb_terminal
    if args.run.is_dir() and not _has_begun(args.run) and (once or any(args.run.glob(f"*/{RUN}"))):
        raise ConfigError(no_run(args.run))

    with suppress(KeyboardInterrupt):
        if once or args.run.is_file():
            follower = Follower(args.run)
            follower.poll()
            if follower.problem:
                raise RunError(follower.problem)
            console.print(picture(follower, console.width))
        else:
            _live(args.run, console)
    return 0


def _has_begun(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RUN, METRICS))


def _live(folder: Path, console: Console) -> None:
    """Wait until a run has begun, and redraw its picture. There is no alternate screen, so the last picture stays."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not _has_begun(folder):
            live.update(Text(printable(f"{folder} has no run yet: waiting for it")), refresh=True)
            time.sleep(TICK)
        follower = Follower(folder)
        while True:
            start = time.monotonic()
            follower.poll()
            live.update(picture(follower, console.width, console.height - 1), refresh=True)
            if follower.how is not None:
                return
            time.sleep(max(TICK - (time.monotonic() - start), 0.05))

"""`bapo-openrlhf watch`: shows a run in the terminal while it goes on."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.record.follow import Follower
from bapo_openrlhf.record.run_record import METRICS, RUN, no_run
from bapo_openrlhf.workbench.watch import picture

TICK = 0.5  # seconds between two looks at the record


def main(argv: Sequence[str], prog: str = "bapo-openrlhf watch") -> int:
    """Parse the flags, then watch until the run has ended or Ctrl-C is pressed."""
    parser = Parser(
        prog,
        "Show a run in the terminal while it goes on: progress, reward curve, batches, buffers, rates. "
        "The command ends with the run, or with Ctrl-C. If the output is not a terminal, it prints one picture.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run on this machine")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    args = parser.parse_args(argv)
    if args.run.is_dir() and not any((args.run / name).exists() for name in (RUN, METRICS)):
        raise ConfigError(no_run(args.run))

    console = Console(highlight=False)
    try:
        follower = Follower(args.run)
        if args.once or not console.is_terminal or console.is_dumb_terminal:
            follower.poll()
            if follower.problem:
                raise RunError(follower.problem)
            console.print(picture(follower, console.width))
        else:
            _live(follower, console)
    except KeyboardInterrupt:
        pass
    return 0


def _live(follower: Follower, console: Console) -> None:
    """Redraw the picture in place. There is no alternate screen, so the last picture stays."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            start = time.monotonic()
            follower.poll()
            live.update(picture(follower, console.width, console.height - 1), refresh=True)
            if follower.how is not None:
                return
            time.sleep(max(TICK - (time.monotonic() - start), 0.05))

"""`bapo-openrlhf buffer`: shows the content of the hard and the replay buffer of a checkpoint."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.cli.show import wide_console
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.state_file import CheckpointError
from bapo_openrlhf.workbench import buffer


def main(argv: Sequence[str], prog: str = "bapo-openrlhf buffer") -> int:
    """Parse the flags, read the entries, and print them."""
    parser = Parser(prog, "List what the hard and the replay buffer of a checkpoint hold, the oldest of each first.")
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="ckpt.path or the folder of a run, which means its newest "
        "whole checkpoint; or the folder _adapt/TAG of one checkpoint")  # fmt: skip
    add("--buffer", choices=buffer.BUFFERS, help="only this buffer")
    add("--limit", type=int, default=50, metavar="N", help="at most N entries (default: 50)")
    add("--tokenizer", metavar="MODEL", help="folder or name of a model; its tokenizer turns the responses into text")
    args = parser.parse_args(argv)
    if args.limit < 1:
        raise ConfigError(f"limit is {args.limit}; it must be at least 1")
    try:
        folder = buffer.find_state(args.checkpoint, lambda text: print(text, file=sys.stderr))
        stored = buffer.read_buffers(folder)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint {str(args.checkpoint)!r} cannot be read: {error}") from error
    chosen = [entry for entry in stored.entries if args.buffer in (None, entry.buffer)]
    decode = buffer.decoder(args.tokenizer) if args.tokenizer else None
    _show(stored, chosen, args.limit, decode)
    return 0


def _show(stored: buffer.Stored, chosen: Sequence[buffer.Entry], limit: int, decode: buffer.Decode | None) -> None:
    console = wide_console(highlight=False)
    lines = [*buffer.summary(stored), ""]
    if not chosen:
        lines.append("no entry was chosen" if stored.entries else "both buffers are empty")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if chosen:
        overflow = "crop" if console.options.ascii_only else "ellipsis"
        console.print(buffer.listing(chosen[:limit], decode, overflow=overflow))
    if len(chosen) > limit:
        console.print(f"and {len(chosen) - limit} more (--limit)")

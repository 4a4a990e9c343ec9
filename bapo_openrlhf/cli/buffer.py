"""`bapo-openrlhf buffer`: shows the content of the hard and the replay buffer of a checkpoint."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.cli.show import wide_console
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.state_file import CheckpointError
from bapo_openrlhf.workbench import buffer

LISTED = 50  # entries that are listed without --limit


def main(argv: Sequence[str], prog: str = "bapo-openrlhf buffer") -> int:
    """Parse the flags, read the entries, then export or print them."""
    parser = Parser(prog, "List what the hard and the replay buffer of a checkpoint hold, the oldest of each first.")
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="ckpt.path or the folder of a run, which means its newest "
        "whole checkpoint; or the folder _adapt/TAG of one checkpoint")  # fmt: skip
    add("--buffer", choices=buffer.BUFFERS, help="only this buffer")
    add("--limit", type=int, metavar="N", help=f"at most N entries; without it, a list has {LISTED}")
    add("--export", type=Path, metavar="FILE.jsonl", help="write one line of JSON per entry instead of the list")
    add("--tokenizer", metavar="MODEL", help="folder or name of a model; its tokenizer turns the responses into text")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"limit is {args.limit}; it must be at least 1")
    try:
        folder = buffer.find_state(args.checkpoint, lambda text: print(text, file=sys.stderr))
        stored = buffer.read_buffers(folder)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint {str(args.checkpoint)!r} cannot be read: {error}") from error
    chosen = [entry for entry in stored.entries if args.buffer in (None, entry.buffer)]
    decode = buffer.decoder(args.tokenizer) if args.tokenizer else None
    if args.export is None:
        _show(stored, chosen, args.limit or LISTED, decode)
        return 0
    limited = chosen[: args.limit]
    try:
        buffer.export(limited, args.export, decode)
    except OSError as error:
        raise ConfigError(f"export {str(args.export)!r} cannot be written: {error.strerror}") from error
    print(f"{len(limited)} of {len(stored.entries)} entries written to {args.export}")
    return 0


def _show(stored: buffer.Stored, chosen: Sequence[buffer.Entry], limit: int, decode: buffer.Decode | None) -> None:
    console = wide_console(highlight=False)
    ascii_only = console.options.ascii_only
    lines = [*buffer.summary(stored), ""]
    if chosen:
        lines.append(f"group mean reward of {len(chosen)} entries")
        lines += [*buffer.histogram(chosen, bar="#" if ascii_only else "█"), ""]
    else:
        lines.append("no entry was chosen" if stored.entries else "both buffers are empty")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if chosen:
        console.print(buffer.listing(chosen[:limit], decode, overflow="crop" if ascii_only else "ellipsis"))
    if len(chosen) > limit:
        console.print(f"and {len(chosen) - limit} more (--limit)")

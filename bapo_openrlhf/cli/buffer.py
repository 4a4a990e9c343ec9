"""`bapo-openrlhf buffer`: shows the content of the hard and the replay buffer of a checkpoint."""

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from bapo_openrlhf.adapt.group import as_fraction
from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.cli.show import wide_console
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.state_file import CheckpointError
from bapo_openrlhf.workbench import buffer

LISTED = 50  # entries that are listed without --limit


def main(argv: Sequence[str], prog: str = "bapo-openrlhf buffer") -> int:
    """Parse the flags, read and select the entries, then export or print them."""
    args = _parse(argv, prog)
    mean = None if args.mean is None else _bounds("mean", *map(_fraction, args.mean))
    age = None if args.age is None else _bounds("age", *args.age)
    for name in ("limit", "rollout_delay"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"{name} is {getattr(args, name)}; it must be at least 1")
    try:
        folder = buffer.find_state(args.checkpoint, lambda text: print(text, file=sys.stderr))
        stored = buffer.read_buffers(folder, args.rollout_delay)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint {str(args.checkpoint)!r} cannot be read: {error}") from error
    chosen = buffer.select(
        stored.entries,
        buffer=args.buffer,
        mean=mean,
        age=age,
        contains=args.contains,
        sort=args.sort,
        reverse=args.reverse,
    )
    decode = buffer.decoder(args.tokenizer) if args.tokenizer else None
    if args.export is not None:
        _check_is_outside(args.export, folder)
        limited = chosen[: args.limit]
        try:
            buffer.export(limited, args.export, tokens=args.tokens, decode=decode)
        except OSError as error:
            raise ConfigError(f"export {str(args.export)!r} cannot be written: {error.strerror}") from error
        print(f"{len(limited)} of {len(stored.entries)} entries written to {args.export}")
        return 0
    _show(stored, chosen, args.limit or LISTED, decode)
    return 0


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(
        prog,
        "List what the hard and the replay buffer of a checkpoint hold. The checkpoint is not changed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="ckpt.path, which means its newest whole "
        "checkpoint; or the folder TAG of one checkpoint in _adapt or _actor")  # fmt: skip
    add("--buffer", choices=buffer.BUFFERS, help="only this buffer")
    add("--mean", nargs=2, metavar=("LOW", "HIGH"), help="only group mean rewards from LOW to HIGH, 0.25 or 1/4")
    add("--age", nargs=2, type=int, metavar=("MIN", "MAX"), help="only entries that are MIN to MAX trainer steps old")
    add("--contains", metavar="TEXT", help="only prompts that contain TEXT")
    add("--sort", choices=list(buffer.SORTS), default="stored", help="order; stored: the oldest of each buffer first")
    add("--reverse", action="store_true", help="the highest comes first")
    add("--limit", type=int, metavar="N", help=f"at most N entries; without it, a list has {LISTED}")
    add("--export", type=Path, metavar="FILE.jsonl", help="write one line of JSON per entry instead of the list")
    add("--tokens", action="store_true", help="also export token ids and log-probs")
    add("--tokenizer", metavar="MODEL", help="folder or name of a model; its tokenizer turns the responses into text")
    add("--rollout-delay", type=int, metavar="V", help="v, for the ages in syncs; default: the value in run.json")
    return parser.parse_args(argv)


def _show(stored: buffer.Stored, chosen: Sequence[buffer.Entry], limit: int, decode: buffer.Decode | None) -> None:
    console = wide_console(highlight=False)
    ascii_only = console.options.ascii_only

    def say(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    for line in buffer.summary(stored):
        say(line)
    if not chosen:
        say("\nno entry was chosen" if stored.entries else "\nboth buffers are empty")
        return
    say(f"\ngroup mean reward of {len(chosen)} entries")
    for line in buffer.histogram(chosen, bar="#" if ascii_only else "█"):
        say(line)
    say()
    console.print(buffer.listing(chosen[:limit], decode, overflow="crop" if ascii_only else "ellipsis"))
    if len(chosen) > limit:
        say(f"and {len(chosen) - limit} more (--limit)")


def _fraction(value: str) -> Fraction:
    try:
        return as_fraction(value)
    except ValueError as error:
        raise ConfigError(f"mean: {error}") from None


def _bounds(name: str, low: Any, high: Any) -> tuple[Any, Any]:
    if low > high:
        raise ConfigError(f"{name} is {low} {high}; the first must not be above the second")
    return low, high


def _check_is_outside(path: Path, folder: Path) -> None:
    """Raise ConfigError for an export into the checkpoints, because it could overwrite one of their files."""
    top = folder.resolve().parent
    top = top.parent if top.name == "_adapt" else folder.resolve()
    if path.resolve().is_relative_to(top):
        raise ConfigError(f"export {str(path)!r} is among the checkpoints in {top}, which must not be changed")

"""How a run ended: in run.json, and in the last line of a run that ended before its time."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError, Ended, RunError, one_line
from bapo_openrlhf.launch.resume import saved_step
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.outcome import UNTRAINED
from bapo_openrlhf.record.state_file import CheckpointError


@contextmanager
def recorded(args: SimpleNamespace, folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Write down how the block ended. Ended then also says how the run goes on, if it does."""
    try:
        yield
    except Ended as ended:
        text = ended.text if ended.code == UNTRAINED else f"{ended.text}. {_goes_on(args, command)}"
        _note(folder, ended.how, ended.code, text)
        raise Ended(ended.how, ended.code, text) from None
    except Exception as error:
        _note(folder, "failed", 1, str(error) if isinstance(error, RunError) else one_line(error))
        raise
    _note(folder, "finished", 0, "")


def _note(folder: Path, how: str, status: int, text: str) -> None:
    with suppress(OSError, ConfigError):  # such as a full disk, which is no reason to hide why a run ended
        record.end_run(folder, how, status=status, text=text)


def _goes_on(args: SimpleNamespace, command: Sequence[str]) -> str:
    more = ["--ckpt.load_enable"] if "--ckpt.load_enable" not in command else []
    more += ["--run.overwrite=false"] if args.run.overwrite else []  # it would delete what was trained
    shown = shlex.join(record.without_secret([*command, *more], args.logger.wandb.key))
    try:
        step = saved_step(args)
    except (CheckpointError, ConfigError, OSError) as error:
        return f"Which step is saved is not known ({one_line(error)}): {shown}"
    if step:
        return f"It goes on with step {step + 1}: {shown}"
    return f"No step is saved{' (ckpt.disable_ds)' if args.ckpt.disable_ds else ''}, so it begins again: {shown}"

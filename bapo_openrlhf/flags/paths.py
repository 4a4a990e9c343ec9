"""The flags that are paths: where `~` is the home folder, and what a run must be able to write."""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError

WRITTEN = ("run.dir", "ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")
READ = (
    "actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path", "data.prompt_dataset",
    "eval.dataset", "train.agent_func_path", "reward.remote_url",
    "model.model_name_or_path", "data.dataset",  # of the warm-up
)  # fmt: skip
METHOD = "adapt.method"  # may be FILE.py:CLASS


def expand_home(flat: argparse.Namespace) -> None:
    """Put the home folder in the place of `~`, at the beginning of each path of a list with commas."""
    for name in (*WRITTEN, *READ, METHOD):
        value = getattr(flat, name, None)
        if isinstance(value, str):
            setattr(flat, name, ",".join(map(os.path.expanduser, value.split(","))))


def make_absolute(args: SimpleNamespace) -> None:
    """Make local paths absolute, because Ray's workers may have another working directory.

    A name on the model hub and an address stay as they are.
    """
    for name in WRITTEN:
        if value := _get(args, name):
            _set(args, name, str(Path(value).resolve()))
    for name in READ:
        value = _get(args, name)
        if isinstance(value, list):
            _set(args, name, [_absolute(part) for part in value])
        elif value:
            _set(args, name, ",".join(map(_absolute, value.split(","))))
    if ".py:" in args.adapt.method:
        file, _, name = args.adapt.method.rpartition(":")
        args.adapt.method = f"{_absolute(file)}:{name}"


def _get(args: SimpleNamespace, name: str) -> Any:
    group, flag = name.split(".")
    return getattr(getattr(args, group, None), flag, None)


def _set(args: SimpleNamespace, name: str, value: Any) -> None:
    group, flag = name.split(".")
    setattr(getattr(args, group), flag, value)


def _absolute(name: str) -> str:
    path, at, inner = name.strip().partition("@")
    return f"{Path(path).resolve()}{at}{inner}" if path and Path(path).exists() else name


def check_written(args: SimpleNamespace) -> None:
    """Check that each folder that a run writes to is one, or can be made.

    Raises:
        ConfigError: The message names the flag, and what is in the way.
    """
    for name in WRITTEN:
        value = _get(args, name)
        if value:
            _check_folder(f"{name} is {value}", Path(value))
    _check_folder(f"run.name is {args.run.name}", run_folder(args))


def run_folder(args: SimpleNamespace) -> Path:
    """The folder of the run."""
    return Path(args.run.dir, args.run.name)


def _check_folder(asked: str, path: Path) -> None:
    if str(path).startswith("~"):
        raise ConfigError(f"{asked}; there is no home folder {path.parts[0]}")
    whole = Path(os.path.realpath(path))  # A link may lead to a folder that is not there yet.
    for place in (whole, *whole.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):  # then it is made, unless a parent is a file
            continue
        except OSError as error:  # for example, a name that is too long, or links in a circle
            raise ConfigError(f"{asked}; it cannot be a folder: {error.strerror}") from None
        if not place.is_dir():
            raise ConfigError(f"{asked}; it must be a folder, and {place} is a file")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(f"{asked}; {place} must be a folder that can be written to")
        return

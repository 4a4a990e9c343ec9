"""The flags that are paths: where `~` is the home folder, and what a run must be able to write."""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import flags_of, set_flags

WRITTEN = ("run.dir", "ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")
READ = (
    "actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path", "data.prompt_dataset",
    "eval.dataset", "train.agent_func_path", "reward.remote_url",
)  # fmt: skip
DATA = ("data.prompt_dataset", "eval.dataset")  # a name may end in @PART
LISTS = (*DATA, "reward.model_name_or_path", "reward.remote_url")  # of names with commas between them
METHOD = "adapt.method"  # may be FILE.py:CLASS


def expand_home(flat: argparse.Namespace) -> None:
    """Put the home folder in the place of `~`, at the beginning of each path."""
    for name in (*WRITTEN, *READ, METHOD):
        value = getattr(flat, name, None)
        if isinstance(value, str):
            parts = value.split(",") if name in LISTS else [value]
            setattr(flat, name, ",".join(os.path.expanduser(part.strip()) for part in parts))


def make_absolute(args: SimpleNamespace) -> None:
    """Make local paths absolute, because Ray's workers may have another working directory. Names of a hub stay."""
    flags = flags_of(args)
    absolute: dict[str, Any] = {name: str(Path(flags[name]).resolve()) for name in WRITTEN if flags.get(name)}
    for name in READ:
        value = flags.get(name)
        if isinstance(value, list):  # of reward functions or servers; OpenRLHF's "agent" stands for itself
            absolute[name] = [_absolute(part) if part.endswith(".py") else part for part in value]
        elif value:
            parts = value.split(",") if name in LISTS else [value]
            absolute[name] = ",".join(_absolute(part, data=name in DATA) for part in parts)
    if ".py:" in flags[METHOD]:
        file, _, name = flags[METHOD].rpartition(":")
        absolute[METHOD] = f"{_absolute(file)}:{name}"
    set_flags(args, absolute)


def _place(name: str, *, data: bool) -> tuple[str, str]:
    """The path of a name, and the part of it that follows."""
    place, at, part = name.strip().partition("@") if data else (name.strip(), "", "")
    return place, at + part


def _absolute(name: str, *, data: bool = False) -> str:
    """The absolute path of a file or folder that is there. A link stays one, because its ending says what it is."""
    place, part = _place(name, data=data)
    return f"{Path(place).absolute()}{part}" if place and os.path.exists(place) else name


def check_read(args: SimpleNamespace) -> None:
    """Check that names are UTF-8, and that OpenRLHF splits no absolute path and `datasets` reads none as a pattern."""
    flags = flags_of(args)
    for name in READ:
        value = flags.get(name)
        for part in value if isinstance(value, list) else [value]:
            check_utf8(f"{name} is {part}", Path(str(part)))
    for name in LISTS:
        value, data = flags.get(name), name in DATA
        for part in value.split(",") if isinstance(value, str) else ():
            path = _absolute(_place(part, data=data)[0])
            for mark in ",@*?[" if data and os.path.exists(path) else ",@" if data else ",":
                what = "at which OpenRLHF splits the value" if mark in ",@" else "which stands for a pattern of names"
                if mark in path:
                    raise ConfigError(
                        f"{name} is {part.strip()}; its absolute path {path} has {mark!r}, {what}: start in another "
                        "folder, or rename this one"
                    )


def check_written(args: SimpleNamespace) -> None:
    """Check that each folder that a run writes to is one, or can be made."""
    flags = flags_of(args)
    for name in WRITTEN:
        if value := flags.get(name):
            _check_folder(f"{name} is {value}", Path(value))
    _check_folder(f"run.name is {args.run.name}", run_folder(args))


def check_utf8(asked: str, path: Path) -> None:
    """Refuse a path whose name is not UTF-8, because JSON and Ray hand names on as UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{asked!a}; the names of files must be UTF-8") from None


def run_folder(args: SimpleNamespace) -> Path:
    """The folder of the run."""
    return Path(args.run.dir, args.run.name)


def _check_folder(setting: str, path: Path) -> None:
    if "://" in setting:  # a Path has lost one of the slashes
        raise ConfigError(f"{setting}; it must be a folder of this machine, such as one where a bucket is mounted")
    check_utf8(setting, path)
    if str(path).startswith("~"):
        raise ConfigError(f"{setting}; there is no home folder {path.parts[0]}")
    real_path = Path(os.path.realpath(path))  # A link may lead to a folder that is not there yet.
    for place in (real_path, *real_path.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):  # then it is made, unless a parent is a file
            continue
        except OSError as error:  # for example, a name that is too long, or links in a circle
            raise ConfigError(f"{setting}; it cannot be a folder: {error.strerror}") from None
        if not place.is_dir():
            raise ConfigError(f"{setting}; it must be a folder, and {place} is a file")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(f"{setting}; {place} must be a folder that can be written to")
        return

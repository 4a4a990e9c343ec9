"""Files that a crash or a power cut leaves whole, and the deletion of folders that may resist.

A folder that is busy, as on a network's file system, is moved aside.
"""

import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

NOT_THERE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # a file system without the fsync of a folder (CIFS, FUSE)
UNDELETED = "_undeleted"  # in ckpt.path: what could not be deleted


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file: at any moment `path` is the whole old file or the whole new one. An OSError names `path`."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()  # because the disk may be full
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object for people and programs, as `write_atomically` writes it."""
    write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def open_to_others(folder: Path) -> None:
    """Give the weights in a folder the rights of new files (umask), because safetensors writes them for the owner."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    umask = next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):
            file.chmod(0o666 & ~umask)


def sync(path: Path) -> None:
    """Make durable what a file holds, or all entries of a folder that were created, renamed or deleted."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_THERE or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def discard(folder: Path, checkpoints: Path) -> None:
    """Delete a folder in `ckpt.path`, or move what is left of it to UNDELETED; an OSError if neither is possible."""

    def stop(_function: Any, path: str, error: tuple) -> None:
        # Python's own error has only the last part of the path.
        raise OSError(error[1].errno, error[1].strerror, path) from error[1]

    aside = checkpoints / UNDELETED
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.rmtree(folder, onerror=stop)
    except OSError as error:
        try:
            aside.mkdir(exist_ok=True)
            os.rename(folder, aside / uuid.uuid4().hex)
        except OSError:
            raise error from None


def undeleted(checkpoints: Path) -> str:
    """What is said if something could not be deleted; otherwise empty."""
    aside = checkpoints / UNDELETED
    return f"{aside} has what could not be deleted; a later save tries it again" if aside.is_dir() else ""

"""Files that a crash or a power cut leaves whole."""

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file. At any moment, even in a power cut, `path` is the old file or the new one and never a part of one.

    Raises:
        OSError: The file cannot be written. The message names `path`, and the old file stays.
    """
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


def sync(path: Path) -> None:
    """Make durable what a file holds, or all entries of a folder that were created, renamed or deleted."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that a crash or a power cut leaves whole."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

NOT_THERE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # a file system without the fsync of a folder (CIFS, FUSE)


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

"""A folder has one owner: the process that writes to it.

The owner holds a lock (`flock`) on the file `.lock`. The operating system releases it when the process ends, however it
ends, so a killed run never blocks its own resume. Children of the process do not hold it. On a file system without
locks the owner renews the time of the file every BEAT seconds instead. It counts as ended after SILENT seconds without
that, or at once if it ran on this machine and is gone.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError

LOCK = ".lock"
BEAT, SILENT = 5.0, 30.0  # seconds, on a file system without locks
SETTLE = 0.5  # seconds after which the later one of two that began together is seen
TRIES = 100  # to open a file that owners create and delete
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # another process has the lock; any other error: there are none

_descriptors: set[int] = set()  # of the locked files


class _Busy(Exception):
    """Another process owns the folder."""


@contextmanager
def owned(folder: Path, *, field: str, what: str, instead: str) -> Iterator[None]:
    """Own a folder for the time of the block. It is created if necessary, and deleted again if it stays empty.

    A ConfigError says that another process owns it, or that it cannot be written. The error begins with `field`, such
    as "run.name is mine". `what` owns such a folder, for example a "run", and `instead` says what else can be done.
    """
    path, created = folder / LOCK, not folder.exists()
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    me = {"host": socket.gethostname(), "process": os.getpid(), "since": now, "at": _place(), "id": uuid.uuid4().hex}
    try:
        descriptor = _lock(path)
        if descriptor is None:
            _claim(path, me)
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _text(me), 0)
    except _Busy:
        raise _refusal(folder, field, what, instead) from None
    except OSError as error:
        raise ConfigError(f"{field}; {error.filename or path} cannot be written: {error.strerror}") from None
    ended = threading.Event()
    if descriptor is None:
        threading.Thread(target=_beat, args=(path, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _release(path, descriptor, me)
        if created:
            with suppress(OSError):
                folder.rmdir()


def check_no_owner(folder: Path, *, field: str, what: str, instead: str) -> None:
    """Raise the ConfigError of `owned`, with the same arguments, if a process owns the folder. Nothing is changed."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return
    except OSError as error:
        silent = time.time() - os.fstat(descriptor).st_mtime
        owner = _owner(folder / LOCK)
        if error.errno not in HELD and (owner is None or _gone(owner) or silent >= SILENT):
            return
    finally:
        os.close(descriptor)
    raise _refusal(folder, field, what, instead)


def is_gone(folder: Path) -> bool:
    """Whether the owner of a folder was a process of this machine that was killed: it left its file, and is gone."""
    try:
        owner = _owner(folder / LOCK)
    except OSError:
        return False
    return owner is not None and _gone(owner)


# ── With locks ──


def _lock(path: Path) -> int | None:
    for _ in range(TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # the last owner has just deleted the folder that it had created
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in HELD:
                raise _Busy from None
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                _descriptors.add(descriptor)
                return descriptor
        os.close(descriptor)  # the last owner has deleted this file after it was opened here
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _release(path: Path, descriptor: int | None, me: dict[str, Any]) -> None:
    if os.getpid() != me["process"]:
        return  # a fork of the owner leaves the block, and owns nothing
    with suppress(OSError):
        if descriptor is not None or _owner(path) == me:
            path.unlink()
    if descriptor is not None:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _close_in_child() -> None:
    """Close what a fork has copied, or the lock would last as long as the child."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)

# ── Without locks ──


def _claim(path: Path, me: dict[str, Any]) -> None:
    mine = path.with_name(f"{LOCK}.{me['id']}")
    try:
        mine.write_bytes(_text(me))
        if (owner := _owner(path)) is not None and not _gone(owner):
            with open(path, "rb") as file:  # a network's file system asks its server again when a file is opened
                silent = os.stat(mine).st_mtime - os.fstat(file.fileno()).st_mtime  # both by the server's clock
            if silent < SILENT:
                raise _Busy
        os.replace(mine, path)
    finally:
        mine.unlink(missing_ok=True)
    time.sleep(SETTLE)
    if _owner(path) != me:
        raise _Busy


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError):
            os.utime(path)


def _gone(owner: dict[str, Any]) -> bool:
    if owner.get("at") is None or owner.get("at") != _place():
        return False
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return True
    except (KeyError, TypeError, OverflowError, PermissionError):
        return False
    return False


def _place() -> str | None:
    """Where a process number has a meaning: the machine and the processes that see each other. None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


# ── The file ──


def _refusal(folder: Path, field: str, what: str, instead: str) -> ConfigError:
    owner = _owner(folder / LOCK) or {}
    facts = [owner.get(name) for name in ("process", "host", "since")]
    who = ": process {} on {}, since {}".format(*facts) if all(facts) else ""
    return ConfigError(
        f"{field}, and {folder} already has a {what} that is going on{who}; wait until it has ended, or {instead}"
    )


def _owner(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        owner = json.loads(text)
    except ValueError:
        owner = None
    return (owner if isinstance(owner, dict) else {}) if text else None


def _text(me: dict[str, Any]) -> bytes:
    return json.dumps(me).encode() + b"\n"

"""A disk that fails or stops where a test wants it to, or that tells what is done to it."""

import builtins
import io
import os
import shutil
from functools import partial
from pathlib import Path

import pytest


def path_of(first) -> str:
    """A path, or that of an open file."""
    return os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)


def let_fail(monkeypatch, function, number, if_it):
    """Let os.FUNCTION fail with an error's number if that is said of the path that it gets first."""
    original = getattr(os, function)

    def fail(first, *args, **kwargs):
        if if_it(path_of(first)):
            raise OSError(number, os.strerror(number), path_of(first))
        return original(first, *args, **kwargs)

    monkeypatch.setattr(os, function, fail)


def logged(monkeypatch, *functions):
    """A list that gets each call of these functions of os, with the names of its files."""
    log = []

    def call(name, original, *paths, **kwargs):
        log.append((name, *(Path(path_of(path)).name for path in paths)))
        return original(*paths, **kwargs)

    for name in functions:
        monkeypatch.setattr(os, name, partial(call, name, getattr(os, name)))
    return log


class Killed(BaseException):
    """What a process does after it was killed: nothing."""


class Half:
    """An open file that writes each part in two halves."""

    def __init__(self, file, step):
        self.file, self.step = file, step

    def write(self, data):
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        self.step(self.file.write, data[half:])
        return len(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def crashed(done, action):
    """Let `action` take so many operations on the disk and no more, also none that would clean up. Was it killed?

    Writing a file counts twice: before the first byte, and after half of the bytes.
    """
    left, original = iter(range(done)), builtins.open

    def step(function, *args, **kwargs):
        if next(left, None) is None:
            raise Killed
        return function(*args, **kwargs)

    def opened(file, mode="r", *args, **kwargs):
        if "w" not in mode:
            return original(file, mode, *args, **kwargs)
        return Half(step(original, file, mode, *args, **kwargs), step)

    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "open"):
                patch.setattr(os, name, partial(step, getattr(os, name)))
            for module in (builtins, io):
                patch.setattr(module, "open", opened)
            action()
    except Killed:
        return True
    return False


def each_crash(base, work, action):
    """Yield for each operation of `action` on a copy of `base`, killed at that operation, and finally not killed."""
    killed, done = True, 0
    while killed:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        killed = crashed(done, lambda: action(work))
        yield
        done += 1
    assert done > 12

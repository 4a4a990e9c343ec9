"""Who owns a folder: with locks, and on a file system that has none. Other owners are processes of their own."""

import errno
import fcntl
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import owner
from bapo_openrlhf.record.owner import LOCK, owned

# Owns the folder argv[1], says so, and ends with its input. With argv[2], the system has no locks.
OTHER = """
import errno, fcntl, sys
from pathlib import Path
from bapo_openrlhf.record.owner import owned
def flock(descriptor, operation):
    raise OSError(errno.ENOTSUP, "no locks")
if sys.argv[2:]:
    fcntl.flock = flock
with owned(Path(sys.argv[1]), field="x is y", what="run", instead="do something else"):
    print("mine", flush=True)
    sys.stdin.read()
"""
WORDS = {"field": "run.name is a", "what": "run", "instead": "give another --run.name"}


def mine(folder: Path):
    return owned(folder, **WORDS)


@contextmanager
def another_owner(folder: Path, *no_locks: str) -> Iterator[subprocess.Popen]:
    words = [sys.executable, "-c", OTHER, str(folder), *no_locks]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"mine\n"
        yield process


@pytest.fixture
def no_locks(monkeypatch) -> None:
    def flock(descriptor, operation):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture(params=[[], ["no locks"]], ids=["locks", "no locks"])
def system(request) -> list[str]:
    """Whether another owner has locks. It is the same in this process."""
    if request.param:
        request.getfixturevalue("no_locks")
    return request.param


def test_the_second_is_refused_in_one_line_that_names_the_first(tmp_path, system):
    folder = tmp_path / "runs" / "a"
    with another_owner(folder, *system) as other:
        record = folder / "run.json"
        record.write_text("{}")
        with pytest.raises(ConfigError) as refused, mine(folder):
            pass
        said = str(refused.value)
        assert said.startswith(f"run.name is a, and {folder} ") and "or give another --run.name" in said
        assert f": process {other.pid} on {socket.gethostname()}, since 20" in said
        with pytest.raises(ConfigError) as seen:
            owner.check_no_owner(folder, **WORDS)
        assert str(seen.value) == said
        assert sorted(path.name for path in folder.iterdir()) == [LOCK, "run.json"] and record.read_text() == "{}"
    owner.check_no_owner(folder, **WORDS)  # it has ended
    with mine(folder):
        pass
    owner.check_no_owner(folder.parent / "b", **WORDS)
    assert not (folder.parent / "b").exists()


def test_a_killed_owner_is_none(tmp_path, system):
    with another_owner(tmp_path, *system) as other:
        other.kill()
        other.wait()
        assert (tmp_path / LOCK).exists()
        with mine(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_what_is_left(tmp_path, system):
    with mine(tmp_path / "new"):
        assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCK]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), mine(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
        raise KeyboardInterrupt
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    with mine(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()


def test_children_do_not_hold_it(tmp_path):
    """A program and a fork that outlive a killed owner, for example workers that Ray left behind."""
    script = OTHER.replace("    print(", "    import os, subprocess\n    CHILDREN\n    print(").replace(
        "CHILDREN", "subprocess.Popen(['cat'], close_fds=False); os.fork() or (sys.stdin.read(), os._exit(0))"
    )
    ours, theirs = os.pipe()  # is at its end for the readers when this process closes its side
    first = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=ours, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"mine\n"
    first.kill()
    first.wait()
    try:
        for again in range(100):  # a fork drops the lock in its first moment, which may be after its parent's last one
            try:
                with mine(tmp_path):
                    break
            except ConfigError:
                assert again < 99, "a child holds the lock"
                time.sleep(0.1)
    finally:
        os.close(ours)
        os.close(theirs)


def test_an_owner_with_a_lock_need_give_no_sign_of_life(tmp_path):
    with another_owner(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        with pytest.raises(ConfigError, match="going on"), mine(tmp_path):
            pass


def test_a_file_that_its_owner_deletes_before_it_is_locked_here(tmp_path, monkeypatch):
    lock, folders = fcntl.flock, [tmp_path]

    def flock(descriptor, operation):
        if folders:
            (folders.pop() / LOCK).unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with mine(tmp_path), pytest.raises(ConfigError, match="going on"), mine(tmp_path):
        pass


def test_a_fork_that_leaves_the_block_leaves_the_lock(tmp_path):
    with mine(tmp_path):
        fork = os.fork()
        if not fork:
            owner._release(tmp_path / LOCK, None, json.loads((tmp_path / LOCK).read_text()))
            os._exit(0)
        os.waitpid(fork, 0)
        assert (tmp_path / LOCK).exists()


def test_each_of_many_owns_it_alone(tmp_path):
    """Threads open the file by themselves, so they are refused as processes are."""
    inside, most, owners = [], [], []

    def work(_) -> None:
        for _ in range(200):
            try:
                with mine(tmp_path / "a"):
                    inside.append(1)
                    time.sleep(0.0005)  # so that another thread comes to its turn here
                    most.append(len(inside))
                    inside.pop()
                owners.append(1)
            except ConfigError as error:
                assert "going on" in str(error)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert max(most) == 1 and owners
    assert not (tmp_path / "a" / LOCK).exists()


class TestSignsOfLife:
    """Without locks. The other owner is on another machine, so only its file says that it lives."""

    @pytest.fixture(autouse=True)
    def settled(self, no_locks, monkeypatch):
        monkeypatch.setattr(owner, "SETTLE", 0)

    def other(self, folder: Path, silent: float, **changed) -> None:
        me = {"host": "elsewhere", "process": os.getpid(), "since": "then", "at": "another boot", "id": "1"}
        (folder / LOCK).write_text(json.dumps(me | changed))
        now = os.stat(folder / LOCK).st_mtime
        os.utime(folder / LOCK, (now, now - silent))

    @pytest.mark.parametrize("changed", [{}, {"process": "?"}, {"process": 2**70}])
    def test_one_that_lives(self, tmp_path, changed):
        self.other(tmp_path, owner.SILENT - 2, **changed)
        with pytest.raises(ConfigError, match="already has a run that is going on: process"), mine(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]

    def test_one_that_is_silent(self, tmp_path):
        self.other(tmp_path, owner.SILENT + 2)
        with mine(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["host"] == socket.gethostname()

    @pytest.mark.parametrize("known", [True, False])
    def test_one_of_this_machine_that_is_gone(self, tmp_path, monkeypatch, known):
        """A machine that does not say which processes see each other knows nothing of a number."""
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        if not known:
            monkeypatch.setattr(owner, "_place", lambda: None)
        self.other(tmp_path, 0, at=owner._place(), process=gone.pid)
        with nullcontext() if known else pytest.raises(ConfigError, match="going on"), mine(tmp_path):
            pass

    @pytest.mark.parametrize("text", ["[1]", "{", '{"process": 1}'])
    def test_a_file_that_nobody_understands(self, tmp_path, text):
        (tmp_path / LOCK).write_text(text)
        with pytest.raises(ConfigError, match="going on;"), mine(tmp_path):
            pass
        os.utime(tmp_path / LOCK, (0, 0))
        with mine(tmp_path):
            pass

    def test_signs_are_given_until_the_end(self, tmp_path, monkeypatch):
        given = queue.Queue()
        monkeypatch.setattr(owner, "BEAT", 0.01)
        monkeypatch.setattr(owner.os, "utime", given.put)
        with mine(tmp_path):
            assert [given.get(timeout=30) for _ in range(2)] == [tmp_path / LOCK] * 2
        for thread in threading.enumerate():
            if thread.name.endswith("(_beat)"):
                thread.join(30)
                assert not thread.is_alive()

    def test_the_later_of_two_that_began_together(self, tmp_path, monkeypatch):
        """The other one replaced the file just after this one did."""
        monkeypatch.setattr(owner.time, "sleep", lambda seconds: self.other(tmp_path, 0))
        with pytest.raises(ConfigError, match=r"process .* on elsewhere, since then"), mine(tmp_path):
            pass
        assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("place", ["file/a", "file", "long/" + 300 * "a", "denied"])
def test_a_folder_that_cannot_be(tmp_path, monkeypatch, place):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "file").touch()
    if place == "denied":
        monkeypatch.setattr(owner.os, "open", refuse)
    refused = pytest.raises(ConfigError, match=r"^run\.name is a; .* cannot be written: [A-Z][a-z ]+$")
    with refused, mine(tmp_path / place):
        pass

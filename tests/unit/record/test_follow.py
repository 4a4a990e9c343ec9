"""Following a run's record: whatever happens to the files, what is known equals what a whole reading gives."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import follow
from bapo_openrlhf.record.follow import Follower, LocalFiles, Reading, open_run


def line(step, note=""):
    return json.dumps({"step": step, "reward/fresh_mean": 0.5, "note": note}).encode() + b"\n"


def whole_reading(path):
    """Every whole line that is a row, by reading all of the file."""
    rows = []
    for part in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            row = json.loads(part.decode())
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class Counted:
    """Files that count the bytes that were read of metrics.jsonl."""

    def __init__(self, files):
        self.files, self.bytes, self.name, self.problem = files, 0, "run", None

    def read(self, offsets):
        readings = self.files.read(offsets)
        self.bytes += len(readings["metrics.jsonl"].data)
        return readings


# ── Steps ──


def test_rows_come_as_they_are_written(tmp_path):
    follower = Follower(LocalFiles(tmp_path))
    path = tmp_path / "metrics.jsonl"
    assert not follower.poll() and follower.rows == [] and follower.ready
    path.write_bytes(line(1))
    assert follower.poll() and [row["step"] for row in follower.rows] == [1]
    assert not follower.poll()
    with path.open("ab") as file:
        file.write(line(2) + line(3)[:10])
    assert follower.poll() and [row["step"] for row in follower.rows] == [1, 2]
    assert not follower.poll()
    with path.open("ab") as file:
        file.write(line(3)[10:])
    assert follower.poll() and follower.rows == whole_reading(path)
    path.unlink()
    assert follower.poll() and follower.rows == []


def test_a_file_is_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    files = Counted(LocalFiles(tmp_path))
    follower = Follower(files)
    for step in range(200):
        with path.open("ab") as file:
            file.write(line(step, "x" * 1000))
        follower.poll()
    assert len(follower.rows) == 200
    assert files.bytes <= path.stat().st_size + 200 * follow.OVERLAP
    before = files.bytes
    for _ in range(10):
        follower.poll()
    assert files.bytes <= before + 10 * follow.OVERLAP


changes = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "half", "finish", "cut", "drop", "replace", "rewrite", "grow", "zeros", "unlink", "junk", "look"]
        ),
        st.integers(0, 6),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(changes, st.integers(0, 2**32), st.booleans())
def test_equal_to_a_whole_reading_after_any_changes(changes, seed, long):
    """Appended to, cut short at any byte, rewritten in place with other rows, replaced as a resume does, deleted."""
    rng = random.Random(seed)
    pending = b""  # the rest of a line that was half-written
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        follower = Follower(LocalFiles(Path(folder)))

        def rows(count):
            # As in a real run, no two written rows are equal; and some are longer than what is compared.
            filler = "y" * rng.choice([0, 700]) if long else ""
            return b"".join(line(rng.randrange(100), f"{filler}{rng.random()}") for _ in range(count))

        def write(data, mode="ab"):
            with path.open(mode) as file:
                file.write(data)

        for kind, count in changes:
            if kind == "append":
                write(pending + rows(count))
                pending = b""
            elif kind == "half":
                data = rows(1)
                cut = rng.randrange(1, len(data))
                write(pending + data[:cut])
                pending = data[cut:]
            elif kind == "finish":
                write(pending)
                pending = b""
            elif kind == "junk":
                write(pending + rng.choice([b"\n", b"{\n", b"[1]\n", b'{"a": 1}\n', b"\xff\xfe\n", b"null\n"]))
                pending = b""
            elif kind == "look":
                follower.poll()
            elif path.exists():
                data, pending = path.read_bytes(), b""
                kept = b"".join(data.splitlines(keepends=True)[:count])
                if kind == "cut":
                    write(data[: rng.randrange(len(data) + 1)], "wb")
                elif kind == "drop":  # in place
                    write(kept + rows(rng.randrange(3)), "wb")
                elif kind == "rewrite":
                    write(rows(count), "wb")
                elif kind == "grow":  # another file that is longer
                    write(kept + rows(8), "wb")
                elif kind == "zeros":  # a mount that shows a size before the bytes
                    write(b"\0" * 30 + b"\n")
                    follower.poll()
                    write(data, "wb")
                elif kind == "replace":
                    (Path(folder) / "new").write_bytes(kept + rows(rng.randrange(12)))
                    os.replace(Path(folder) / "new", path)
                elif kind == "unlink":
                    path.unlink()
            if rng.random() < 0.6:
                follower.poll()
                expected = whole_reading(path)
                # A line that is no row may become one: for a while those behind it are not shown.
                assert follower.rows == expected[: len(follower.rows)]
                if len(expected) == (path.read_bytes().count(b"\n") if path.exists() else 0):
                    assert follower.rows == expected
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        for _ in range((lines + 1) * (follow.PATIENCE + 1)):
            follower.poll()
        assert follower.rows == whole_reading(path)
        assert follower.broken == lines - len(follower.rows)


def test_bytes_that_come_late_are_waited_for(tmp_path):
    path = tmp_path / "metrics.jsonl"
    data = line(1) + line(2) + line(3)
    holes = bytearray(data)
    start = len(line(1)) + 3
    holes[start : start + 8] = b"\0" * 8
    path.write_bytes(holes)
    follower = Follower(LocalFiles(tmp_path))
    for _ in range(follow.PATIENCE):
        follower.poll()
        assert [row["step"] for row in follower.rows] == [1]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data[start : start + 8])
    follower.poll()
    assert [row["step"] for row in follower.rows] == [1, 2, 3] and follower.broken == 0


def test_broken_lines_are_those_of_the_file_that_is_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b"{\n[]\n" + line(2))
    follower = Follower(LocalFiles(tmp_path))
    for _ in range(2 * follow.PATIENCE + 2):
        follower.poll()
    assert follower.broken == 2 and [row["step"] for row in follower.rows] == [1, 2]
    path.write_bytes(line(3))
    follower.poll()
    assert follower.broken == 0 and [row["step"] for row in follower.rows] == [3]


def test_what_was_read_stays_while_a_file_cannot_be_read(tmp_path):
    """And while a file that was replaced has not come yet."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(line(1))
    files = LocalFiles(path.parent)
    follower = Follower(files)
    follower.poll()
    path.unlink()
    path.mkdir()  # reading it is an OSError, as of a mount that has lost its server
    assert not follower.poll() and "metrics.jsonl cannot be read" in files.problem
    assert len(follower.rows) == 1
    path.rmdir()
    path.parent.rename(tmp_path / "elsewhere")
    assert not follower.poll() and "is not there any more" in files.problem
    assert len(follower.rows) == 1
    path.parent.mkdir()
    follower.poll()
    assert files.problem is None and follower.rows == []


class Answers:
    """Files whose answers come one by one, and may be late, as those of another machine."""

    problem = None

    def __init__(self, *answers):
        self.answers, self.offsets = list(answers), []

    def read(self, offsets):
        self.offsets.append(offsets["metrics.jsonl"])
        return self.answers.pop(0) if self.answers else {}


def test_what_was_read_stays_until_the_file_that_replaced_it_has_come():
    new = {"metrics.jsonl": Reading("b", 1.0, line(5))}
    answers = Answers({}, {"metrics.jsonl": Reading("a", 7.0, line(1))}, new, {}, new)
    follower = Follower(answers)
    assert not follower.poll() and not follower.ready
    assert follower.poll() and follower.ready and follower.age == 7.0
    assert not follower.poll() and [row["step"] for row in follower.rows] == [1]
    assert follower.poll() and [row["step"] for row in follower.rows] == [5]
    assert answers.offsets == [0, 0, 0, 0, 0]  # one line is less than what is compared


# ── run.json and summary.json ──


def test_documents_are_read_when_they_change(tmp_path):
    follower = Follower(LocalFiles(tmp_path))
    run, summary = tmp_path / "run.json", tmp_path / "summary.json"
    follower.poll()
    assert (follower.run, follower.summary) == ({}, {})
    big = {"name": "a", "config": {f"flag{i}": i for i in range(200)}}
    text = json.dumps(big)
    assert len(text) > follow.OVERLAP
    run.write_text(text[:300])
    follower.poll()
    assert follower.run == {}, "half of it"
    run.write_text(text)
    assert follower.poll() and follower.run == big
    assert not follower.poll()
    run.write_text(json.dumps(big | {"resumed": ["2026-01-01"]}))  # longer, in place
    follower.poll()
    follower.poll()
    assert follower.run["resumed"] == ["2026-01-01"]
    for name in ("b", "c"):  # the same size, replaced as the record does it
        (tmp_path / "new").write_text(json.dumps(big | {"name": name}))
        os.replace(tmp_path / "new", run)
        assert follower.poll() and follower.run["name"] == name
    summary.write_text("{}")
    follower.poll()
    summary.write_text('{"steps": 3}')
    follower.poll()
    follower.poll()
    assert follower.summary == {"steps": 3}
    summary.unlink()
    assert follower.poll() and follower.summary == {}
    run.write_text("[1, 2]")
    follower.poll()
    assert follower.run["name"] == "c"


def test_the_progress_bar_follows(tmp_path):
    """Without ever reading the whole record."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from bapo_openrlhf.record import progress\n"
        "from bapo_openrlhf.record import run_record as record\n"
        "record.read_metrics = None\n"
        "folder = Path(sys.argv[1])\n"
        "with progress.progress_bar(folder, 20, 'night'):\n"
        "    run = record.RunRecord(folder)\n"
        "    for step in range(1, 6):\n"
        "        run.append(step, {'reward/fresh_mean': step / 8, 'groups/fresh': step, 'groups/replayed': 2})\n"
        "    print('to the log')"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert done.stderr.splitlines()[-1] == "night: step 5/20, reward 0.625, groups 5+0+2"
    assert (tmp_path / "train.log").read_text() == "to the log\n"


def test_age_is_the_last_steps_and_before_it_the_starts(tmp_path):
    follower = Follower(LocalFiles(tmp_path))
    follower.poll()
    assert follower.age is None
    for name, age in (("run.json", 500), ("metrics.jsonl", 40)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
        follower.poll()
        assert follower.age == pytest.approx(age, abs=5)


# ── Where a run is ──


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"'.*/nowhere' does not exist"):
        open_run(str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"'.*/file' is a file"):
        open_run(str(tmp_path / "file"))


@pytest.mark.parametrize("target", [":runs/x", "-oProxyCommand=touch x:runs", "host:", "a b:runs/x", "host:a\nb"])
def test_targets_that_are_no_run_are_refused_before_ssh_is_called(target, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("ssh was called"))
    with pytest.raises(ConfigError, match=r"\[user@\]host:path"):
        open_run(target)


def test_a_path_with_a_colon_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "host:run").mkdir()
    assert isinstance(open_run("host:run"), LocalFiles)
    assert isinstance(open_run(str(tmp_path / "host:run")), LocalFiles)


def test_following_imports_nothing_heavy():
    code = (
        "import sys, bapo_openrlhf.record.follow, bapo_openrlhf.cli.watch\n"
        "assert not {'torch', 'numpy', 'ray', 'matplotlib', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ── Over ssh ──

# Runs the command here, in the shell that a login there would run it in. As ssh does, it says on standard error why it
# does not get there, and exits with 255.
STUB = """#!/bin/sh
printf '%s\\n' "$*" >> "$STUB/calls"
if [ -e "$STUB/down" ]; then echo "ssh: connect to host there port 22: Connection refused" >&2; exit 255; fi
echo "Welcome! Your last login was long ago."
for command; do :; done
echo $$ > "$STUB/pid"
exec "${STUB_SHELL:-sh}" -c "$command"
"""


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder that `there:run` is, with the stub's own files beside it."""
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "ssh").write_text(STUB)
    (stub / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB", str(stub))
    home = tmp_path / "home"
    (home / "run").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    monkeypatch.setattr(follow, "LONGEST_PAUSE", 0.1)
    return home / "run"


def until(condition, follower, seconds=60):
    """Poll until something holds; fail where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (follower.files.problem, follower.rows)
        follower.poll()


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("path", ["run", "~/run", "{}"])
def test_a_remote_run_is_followed(there, monkeypatch, shell, path):
    monkeypatch.setenv("STUB_SHELL", shell)
    metrics = there / "metrics.jsonl"
    files = open_run(f"me@there:{path.format(there)}")
    follower = Follower(files)
    assert files.name == "run"
    until(lambda: follower.ready, follower)
    assert follower.rows == [] and follower.age is None
    metrics.write_bytes(line(1, "é") + line(2)[:9])
    os.utime(metrics, (time.time() - 100,) * 2)
    (there / "run.json").write_text('{"name": "far", "seed": 3}')
    until(lambda: follower.rows and follower.run, follower)
    assert follower.rows == whole_reading(metrics) and follower.run == {"name": "far", "seed": 3}
    assert follower.age == pytest.approx(100, abs=30)
    metrics.write_bytes(line(1, "é") + line(2))
    until(lambda: len(follower.rows) == 2, follower)
    (there / "new").write_bytes(line(1, "again"))
    os.replace(there / "new", metrics)
    (there / "summary.json").write_text('{"steps": 1}')
    until(lambda: follower.summary and len(follower.rows) == 1, follower)
    assert follower.rows == whole_reading(metrics)
    metrics.unlink()
    until(lambda: not follower.rows, follower)
    files.close()
    calls = (Path(os.environ["STUB"]) / "calls").read_text()
    assert "me@there" in calls and "BatchMode" not in calls and calls.count("me@there") == 1


def test_names_with_spaces_quotes_and_dashes(there):
    for name in ("two words", 'it\'s $HOME `x` "y" !z', "-n"):
        (there.parent / name).mkdir()
        (there.parent / name / "metrics.jsonl").write_bytes(line(7))
        files = open_run(f"there:{name}")
        follower = Follower(files)
        until(lambda: follower.ready, follower)  # noqa: B023
        assert [row["step"] for row in follower.rows] == [7], name
        files.close()


def test_new_bytes_alone_are_sent(there):
    metrics = there / "metrics.jsonl"
    metrics.write_bytes(b"".join(line(step, "x" * 1000) for step in range(2000)))
    files = open_run("there:run")
    counted = Counted(files)
    counted.read = lambda offsets: received(files.read(offsets))
    follower = Follower(counted)

    def received(readings):
        counted.bytes += sum(len(reading.data) for reading in readings.values())
        return readings

    until(lambda: len(follower.rows) == 2000, follower)
    first = counted.bytes
    assert first == metrics.stat().st_size
    for step in range(2000, 2010):
        with metrics.open("ab") as file:
            file.write(line(step, "x" * 1000))
        until(lambda: len(follower.rows) == step + 1, follower)  # noqa: B023
    assert counted.bytes - first < 20 * (len(line(0, "x" * 1000)) + follow.OVERLAP)
    files.close()


def test_a_lost_connection_is_made_again_with_a_message(there):
    stub = Path(os.environ["STUB"])
    metrics = there / "metrics.jsonl"
    metrics.write_bytes(line(1))
    files = open_run("there:run")
    follower = Follower(files)
    until(lambda: follower.rows, follower)
    (stub / "down").touch()
    os.kill(int((stub / "pid").read_text()), signal.SIGKILL)
    until(lambda: files.problem, follower)
    assert files.problem.startswith("connection to there lost") and "trying again in" in files.problem
    until(lambda: "ssh says: ssh: connect to host there port 22: Connection refused" in files.problem, follower)
    assert len(follower.rows) == 1
    metrics.write_bytes(line(1) + line(2))
    (stub / "down").unlink()
    until(lambda: len(follower.rows) == 2, follower)
    assert files.problem is None
    calls = (stub / "calls").read_text().splitlines()
    assert "BatchMode=yes" not in calls[0] and all("BatchMode=yes" in call for call in calls[1:])
    there.rename(there.parent / "gone")
    until(lambda: files.problem, follower)
    assert files.problem == "there:run is not there any more" and len(follower.rows) == 2
    files.close()


def test_a_connection_that_says_nothing_is_lost(there, monkeypatch):
    (there / "metrics.jsonl").write_bytes(line(1))
    files = open_run("there:run")
    follower = Follower(files)
    until(lambda: follower.rows, follower)
    os.kill(int((Path(os.environ["STUB"]) / "pid").read_text()), signal.SIGSTOP)
    monkeypatch.setattr(follow, "SILENCE", 1.0)
    until(lambda: files.problem, follower)
    assert "no answer for 1 s" in files.problem
    until(lambda: files.problem is None, follower)
    files.close()


def test_errors_of_the_first_connection(there, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="'nowhere' on there does not exist"):
        open_run("there:nowhere")
    (there.parent / "file").touch()
    with pytest.raises(ConfigError, match="'file' on there is a file"):
        open_run("there:file")
    (Path(os.environ["STUB"]) / "down").touch()
    with pytest.raises(ConfigError, match="there:run cannot be read: ssh says: ssh: connect to host there port 22"):
        open_run("there:run")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"does not start: .*ssh"):
        open_run("there:run")


def test_the_shell_there_ends_with_the_connection(there):
    """ssh closes its standard input then."""
    question = f"mark\n{there}\nmetrics.jsonl 0\n"
    done = subprocess.run(["sh", "-c", follow.REMOTE], input=question, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("mark folder\nnone ") and done.stdout.endswith("\nmark\n")


def test_ssh_ends_with_the_watch(there):
    files = open_run("there:run")
    pid = int((Path(os.environ["STUB"]) / "pid").read_text())
    os.kill(pid, 0)
    files.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_command_passes_through_any_login_shell():
    assert not set("'!\n") & set(follow.REMOTE)

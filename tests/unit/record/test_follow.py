"""Following a record: whatever happens to the files, the follower knows what a whole reading would return."""

import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_owner import another_owner

from bapo_openrlhf.record import follow
from bapo_openrlhf.record.follow import Follower
from bapo_openrlhf.record.run_record import EVALUATIONS, WARNINGS, append_rows


def line(step, note=""):
    return json.dumps({"step": step, "reward/fresh_mean": 0.5, "note": note}).encode() + b"\n"


def whole_reading(path):
    """Read the whole file and return every row in a whole line."""
    rows = []
    for part in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            row = json.loads(part.decode())
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def test_a_process_that_was_killed(tmp_path):
    """It leaves its lock behind, and its number is of no process any more."""
    follower = Follower(tmp_path)
    with another_owner(tmp_path) as process:
        follower.poll()
        assert not follower.killed and follower.how is None
        process.kill()
    follower.poll()
    assert follower.killed and follower.how == "killed"
    (tmp_path / "run.json").write_text('{"ended": {"how": "stopped", "at": "", "status": 143, "text": ""}}')
    follower.poll()
    assert follower.how == "stopped"


def test_a_file_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    follower, read = Follower(tmp_path), 0

    class Counted(io.FileIO):
        def read(self, size=-1):
            nonlocal read
            data = super().read(size)
            read += len(data)
            return data

    monkeypatch.setattr(follow, "open", lambda path, mode: Counted(path), raising=False)
    for step in range(200):
        with path.open("ab") as file:
            file.write(line(step, "x" * 1000))
        follower.poll()
    assert len(follower.rows) == 200
    assert read <= path.stat().st_size + 200 * follow.OVERLAP
    before = read
    for _ in range(10):
        follower.poll()
    assert read <= before + 10 * follow.OVERLAP


KINDS = ["append", "half", "finish", "cut", "drop", "replace", "rewrite", "grow", "zeros", "unlink", "junk", "look"]
changes = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 6)), max_size=25)


@settings(max_examples=3 * settings.default.max_examples)
@given(changes, st.integers(0, 2**32), st.booleans())
def test_equal_to_a_whole_reading_after_any_changes(changes, seed, long):
    """Lines are appended, cut at any byte, rewritten in place, replaced like in a resume, and deleted."""
    rng = random.Random(seed)
    pending = b""  # the rest of a line that was half-written
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        follower = Follower(Path(folder))

        def rows(count):
            # As in a real run, no two rows are equal. Some are longer than the overlap that is compared.
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
                elif kind == "grow":  # a longer file
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
                assert follower.rows == whole_reading(path)
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        follower.poll()
        assert follower.rows == whole_reading(path)
        assert follower.broken == lines - len(follower.rows)


def test_what_was_read_stays_while_a_file_cannot_be_read(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(line(1))
    follower = Follower(path.parent)
    follower.poll()
    path.unlink()
    path.mkdir()  # reading it raises OSError, like a mount that has lost its server
    follower.poll()
    assert "metrics.jsonl cannot be read" in follower.problem
    assert len(follower.rows) == 1
    path.rmdir()
    path.parent.rename(tmp_path / "elsewhere")
    follower.poll()
    assert "is not there any more" in follower.problem
    assert len(follower.rows) == 1
    path.parent.mkdir()
    follower.poll()
    assert follower.problem is None and follower.rows == []


def test_documents_are_read_when_they_change(tmp_path):
    follower = Follower(tmp_path)
    run, summary = tmp_path / "run.json", tmp_path / "summary.json"

    def seen(path=None, text=""):
        if path is not None:
            path.write_text(text)
        follower.poll()
        return follower.run, follower.summary

    assert seen() == ({}, {})
    big = {"name": "a", "config": {f"flag{i}": i for i in range(200)}}
    text = json.dumps(big)
    assert len(text) > follow.OVERLAP
    assert seen(run, text[:300]) == ({}, {}), "half of it"
    assert seen(run, text) == (big, {})
    assert seen() == (big, {})  # nothing is new
    (tmp_path / "new").write_text(json.dumps(big | {"name": "b"}))
    os.replace(tmp_path / "new", run)  # the same size, replaced like the record replaces it
    assert seen() == (big | {"name": "b"}, {})
    assert seen(summary, '{"steps": 3}')[1] == {"steps": 3}
    summary.unlink()
    assert seen()[1] == {}
    assert seen(run, "[1, 2]")[0]["name"] == "b"


def test_the_progress_bar_follows(tmp_path):
    """It never reads the whole record."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from bapo_openrlhf.record import progress\n"
        "from bapo_openrlhf.record import run_record as record\n"
        "record.read_metrics = None\n"
        "folder = Path(sys.argv[1])\n"
        "with progress.progress_bar(folder, 20, 'night'):\n"
        "    for step in range(1, 6):\n"
        "        metrics = {'reward/fresh_mean': step / 8, 'groups/fresh': step, 'groups/replayed': 2}\n"
        "        record.append_rows(folder, record.METRICS, step, [metrics])\n"
        "        warning = {'kind': 'x' * step, 'text': f'step {min(step, 3)}: [bold] is long' + ' and so on' * 20}\n"
        "        record.append_rows(folder, record.WARNINGS, step, [warning])\n"
        "        scores = [{'eval_[b]_pass1': step / 8}] if step in (1, 4) else []\n"
        "        record.append_rows(folder, record.EVALUATIONS, step, scores)\n"
        "        time.sleep(0.7)\n"  # so that it is looked at more than once
        "    print('to the log')"
    )
    append_rows(tmp_path, WARNINGS, 1, [{"kind": "old", "text": "step 1: [bold] is long" + " and so on" * 20}])
    append_rows(tmp_path, EVALUATIONS, 1, [{"eval_[b]_pass1": 0.125}])
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    held_out = [line for line in done.stderr.splitlines() if "held-out" in line]  # once, and none of an earlier start
    assert held_out == ["step 4: held-out [b] 0.500"]
    assert done.stderr.splitlines()[-1] == "night: step 5/20, reward 0.625, groups 5+0+2"
    said = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]  # each once, and no older one
    assert said == [f"warning: step {step}: [bold] is long" + " and so on" * 20 for step in (2, 3)]
    assert (tmp_path / "train.log").read_text() == "to the log\n"


def test_the_errors_that_a_failed_runs_log_names_are_printed(tmp_path):
    """The cause is often in another process: vLLM's own, behind an actor of Ray. An earlier start's are not said."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bapo_openrlhf.record import progress\n"
        "with progress.progress_bar(Path(sys.argv[1]), 20, 'night'):\n"
        "    print(f'\\x1b[36m(Engine pid=7)\\x1b[0m (Core pid=9) ERROR ValueError: {sys.argv[2]} GiB are free')\n"
        "    print(f'(Core pid=9) ValueError: {sys.argv[2]} GiB are free')\n"
        "    print('ray.exceptions.ActorDiedError: The actor died: ray::Engine.__init__()')\n"
        "    print('RuntimeError: See root cause above')\n"
        "    print('an Error: in a text' + 40 * '\\na model')\n"
        "    raise RuntimeError('See root cause above')"
    )
    for free in ("9", "8"):
        done = subprocess.run([sys.executable, "-c", code, tmp_path, free], capture_output=True, text=True, timeout=60)
        said = done.stderr[: done.stderr.index("Traceback")].splitlines()
        assert said[-2:] == [f"ValueError: {free} GiB are free", "RuntimeError: See root cause above"]
        assert sum("GiB" in line for line in said) == 1
    log = (tmp_path / "train.log").read_text()
    assert "9 GiB" in log and "8 GiB" in log  # a crash says its reason there


def test_age_is_the_last_steps_and_before_it_the_starts(tmp_path):
    follower = Follower(tmp_path)
    follower.poll()
    assert follower.age is None
    for name, age in (("run.json", 500), ("metrics.jsonl", 40)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
        follower.poll()
        assert follower.age == pytest.approx(age, abs=5) and follower.begins is (name == "run.json")
    os.utime(tmp_path / "run.json")  # it is resumed
    follower.poll()
    assert follower.age == pytest.approx(0, abs=5) and follower.begins

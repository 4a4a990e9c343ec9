"""`tools/stoppable.py`: what a command started ends with it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOPPABLE = [sys.executable, str(ROOT / "tools" / "stoppable.py")]
# Starts a process that is nobody's child, as a daemon is, and one that is a child.
FAMILY = """
(setsid sh -c 'echo $$ >> pids; while :; do sleep 0.1; done' > out 2>&1 &)
sh -c 'echo $$ >> pids; exec sleep 600' > out 2>&1 &
echo $$ >> pids
wait
"""


def alive(folder):
    result = []
    for pid in (folder / "pids").read_text().split():
        with suppress(OSError):
            result += [pid] if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" else []
    return result


@pytest.fixture
def start(tmp_path):
    """Starts a command that starts FAMILY, and waits until all three processes are there."""
    started = []

    def start(*command):
        process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
        started.append(process)
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 3:
            assert process.poll() is None
            time.sleep(0.02)
        assert len(alive(tmp_path)) == 3
        return process

    yield start
    for process in started:
        process.kill()
    for pid in alive(tmp_path):
        os.kill(int(pid), signal.SIGKILL)


IGNORES = FAMILY.replace("'echo", '\'trap "" TERM; echo')  # a daemon that ignores SIGTERM


@pytest.mark.parametrize("family", [FAMILY, IGNORES], ids=["", "ignored"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_all_processes_end(start, tmp_path, number, family):
    process = start(*STOPPABLE, "sh", "-c", family)
    process.send_signal(number)
    assert process.wait(60) == 128 + number and alive(tmp_path) == []


def test_make_passes_it_on(start, tmp_path):
    """In the way in which the Makefile calls it. Make runs a shell for a line with quotes, and none for another."""
    (tmp_path / "family.sh").write_text(FAMILY)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    lines = (ROOT / "Makefile").read_text().splitlines()
    named = [line for line in lines if line.startswith(("PYTHON ", "STOPPABLE "))]
    (tmp_path / "Makefile").write_text("\n".join([*named, "all:", '\t@$(STOPPABLE) sh family.sh "a b"\n']))
    process = start("make")
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert alive(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_may_end_by_itself(start, tmp_path, number):
    """Ctrl-C reaches all processes of a terminal's job. The others reach the command, and its own child goes on."""
    told = f"trap 'sleep 1; kill -0 $! && echo ended > end; exit 3' {number.name.removeprefix('SIG')}"
    process = start(*STOPPABLE, "sh", "-c", f"{told}; {FAMILY}")
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert process.wait(60) == 128 + number and (tmp_path / "end").read_text() == "ended\n"
    assert alive(tmp_path) == []


def test_a_second_ctrl_c_does_not_wait(start, tmp_path):
    process = start(*STOPPABLE, "sh", "-c", f"trap '' INT TERM; {FAMILY}")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert len(alive(tmp_path)) == 3
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert alive(tmp_path) == []


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_status_is_that_of_the_command(script, status):
    assert subprocess.run([*STOPPABLE, "sh", "-c", script]).returncode == status


def test_what_outlives_a_command_that_ends_by_itself_goes_on(tmp_path):
    """Only a signal ends the others: nothing hides that a test left a process behind."""
    script = "sleep 600 > out 2>&1 & echo $! > pids"
    assert subprocess.run([*STOPPABLE, "sh", "-c", script], cwd=tmp_path).returncode == 0
    [pid] = alive(tmp_path)
    os.kill(int(pid), signal.SIGKILL)

"""From outside and from inside, a forked process looks like one that Python has started."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bapo_openrlhf.cpu.prefork import client, serving
from bapo_openrlhf.cpu.prefork.server import HEAD, read_request

FORKED = "import sys; print('prefork_prepared' in sys.modules)"


@pytest.fixture
def unserved(tmp_path, monkeypatch):
    """There is no server yet, and prefork_template can be imported."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.setenv("PREFORK_TEST_FILE", str(tmp_path / "notes"))
    monkeypatch.setenv(client.ADDRESS, "")


@pytest.fixture
def server(unserved, tmp_path, monkeypatch):
    """A server that has imported prefork_template. The fixture returns the notes that it and its children wrote."""
    monkeypatch.setenv("FIXED", "1")
    monkeypatch.setenv("TO_BE_REMOVED", "1")
    (tmp_path / "notes").touch()
    with serving.serving("prefork_template:prepare"):
        yield lambda: [tuple(line.split()) for line in (tmp_path / "notes").read_text().splitlines()]


def python(*words, **options):
    return subprocess.run([serving.python(), *map(str, words)], capture_output=True, text=True, timeout=60, **options)


def started(program):
    """A client of a program, once that has said a line; and the line."""
    process = subprocess.Popen([serving.python(), "-c", program], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("nothing happened in 30 s")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


PROGRAM = """
import json, os, sys
names = ("SET_ON_IMPORT", "TO_BE_REMOVED", "NEW", "FIXED")
print(json.dumps({
    "argv": sys.argv[1:], "folder": os.getcwd(), "input": sys.stdin.read(), "name": __name__,
    "environment": {name: os.environ.get(name) for name in names},
    "prepared": "prefork_prepared" in sys.modules, "main": sys.modules["__main__"].__dict__ is globals(),
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("program", [
    "raise SystemExit",
    "raise SystemExit('why')",
    "raise SystemExit(300)",
    "raise ValueError('no')",
    "import atexit; atexit.register(print, 'at the end'); 1 / 0",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()",
    "import sys; sys.stdout.close()",
])  # fmt: skip
def test_program_ends_as_in_python_itself(server, program):
    actual = python("-c", program)
    wanted = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = [done.stderr.splitlines()[-1:] for done in (actual, wanted)]  # a traceback also has frames of the server
    assert (actual.returncode, actual.stdout, last[0]) == (wanted.returncode, wanted.stdout, last[1])


def test_program_is_not_taken_apart_at_its_end(server):
    """That would take seconds with a whole stack in memory."""
    program = "class Late:\n    def __del__(self): print('taken apart')\nlate = Late(); print('ran')"
    assert python("-c", program).stdout == "ran\n"


@pytest.mark.parametrize("how", ["script", "module", "code"])
def test_program_sees_what_it_was_started_with(server, tmp_path, how):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "NEW": "new", "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    del environment["TO_BE_REMOVED"]
    words = {"script": [tmp_path / "program.py"], "module": ["-m", "program"], "code": ["-c", PROGRAM]}[how]
    done = python("-u", "-X", "utf8", *words, "--flag", "a b", env=environment, cwd=tmp_path, input="typed")
    assert (done.stderr, done.returncode) == ("to stderr\n", 7)
    assert json.loads(done.stdout) == {
        "argv": ["--flag", "a b"], "folder": str(tmp_path), "input": "typed", "name": "__main__",
        "environment": {"SET_ON_IMPORT": "yes", "TO_BE_REMOVED": None, "NEW": "new", "FIXED": "1"},
        "prepared": True, "main": True,
    }  # fmt: skip


def test_preparation_happens_once_and_each_child_is_a_process_of_its_own(server):
    for _ in range(3):
        assert python("-c", FORKED).stdout == "True\n"
    words, pids = zip(*server(), strict=True)
    assert words == ("prepared", "child", "child", "child") and len(set(pids)) == 4


def test_open_files_keep_their_numbers(server, tmp_path):
    """The server itself uses some of these numbers, and it receives them in another order."""
    numbers = [9, 5, 40, 3, *range(70, 50, -1)]
    program = f"import os; [os.write(n, str(n).encode()) for n in {numbers}]; print(os.listdir('/proc/self/fd'))"
    opened = " ".join(f"{number}>{tmp_path / str(place)}" for place, number in enumerate(numbers))
    words = ["bash", "-c", f'exec "$0" "$@" {opened}', serving.python(), "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert [(tmp_path / str(place)).read_text() for place in range(len(numbers))] == list(map(str, numbers))
    there = set(map(int, eval(done.stdout)))
    # 4 and 6 belong to the listing, so no file of the server is left open.
    assert there - {0, 1, 2} - set(numbers) <= {4, 6}


def test_nothing_of_the_server_is_closed_later_under_a_number_used_again(server):
    program = (
        "import gc\nfiles = [open('/dev/null', 'w') for _ in range(20)]\ngc.collect()\n"
        "for file in files: file.write('x'); file.flush()\nprint('all open')"
    )
    done = python("-c", program)
    assert (done.stdout, done.stderr) == ("all open\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_go_down_and_the_end_by_a_signal_comes_up(server, number):
    program = (
        "import signal, time, os\n"
        f"def handler(*_): print('got it', flush=True); signal.signal({int(number)}, signal.SIG_DFL); "
        f"os.kill(os.getpid(), {int(number)})\n"
        f"signal.signal({int(number)}, handler)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    process, line = started(program)
    assert line == "ready"
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "got it\n" and process.returncode == -number


def test_signal_before_the_client_knows_its_child_goes_down_too(tmp_path):
    """The child may run, and others may know it, before its pid has arrived at the client."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / client.SOCKET))
        listener.listen()
        listener.settimeout(60)
        environment = {**os.environ, client.ADDRESS: str(tmp_path)}
        process = subprocess.Popen([sys.executable, client.__file__, "-c", "pass"], env=environment)
        connection, _ = listener.accept()
        connection.recv(1 << 16)  # the client has asked and waits for the pid
        process.send_signal(signal.SIGTERM)
        child = subprocess.Popen(["sleep", "600"])
        connection.sendall(f"{child.pid}\n".encode())
        assert child.wait(timeout=60) == -signal.SIGTERM
        connection.sendall(f"{int(signal.SIGTERM)}\n".encode())
        assert process.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("blocked", [set(), {signal.SIGTERM, signal.SIGUSR2}])
def test_the_same_signals_are_blocked(unserved, served, blocked, monkeypatch, tmp_path):
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with serving.serving("prefork_template:prepare"):
        executable = serving.python()
        if not served:
            monkeypatch.setenv(client.ADDRESS, str(tmp_path))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        done = subprocess.run([executable, "-c", program], capture_output=True, text=True, timeout=60)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.stdout == f"{before | blocked}\n"


def test_the_server_leaves_signals_to_others(server):
    """One that goes to every process of a job reaches it too."""
    python("-c", "import os, signal; [os.kill(os.getppid(), number) for number in (1, 2, 10, 12, 15, 24)]")
    assert python("-c", FORKED).stdout == "True\n"


def test_a_hang_up_that_is_ignored_stays_so(server, tmp_path):
    """As `nohup` does it: only its own child would end by it."""
    program = f"import time, pathlib; pathlib.Path({str(tmp_path / 'there')!r}).touch(); time.sleep(600)"
    process = subprocess.Popen(["bash", "-c", 'trap "" HUP; exec "$@"', "bash", serving.python(), "-c", program])
    until((tmp_path / "there").exists)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_interrupt_raises_in_the_program(server):
    # Short sleeps, because a signal that arrives just before a sleep does not end that one.
    program = "import time\ntry:\n print('ready', flush=True)\n while True: time.sleep(0.05)\n"
    program += "except KeyboardInterrupt: print('stopped')"
    process, line = started(program)
    assert line == "ready"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "stopped\n" and process.returncode == 0


def sleeper():
    """A client whose child sleeps, and the child's pid."""
    process, line = started("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    child = int(line)
    assert child != process.pid and alive(child)
    return process, child


def test_child_of_a_killed_client_is_killed_and_the_server_goes_on(server):
    (first, child), (second, other) = sleeper(), sleeper()
    first.kill()
    until(lambda: not alive(child))
    assert alive(other)
    assert python("-c", FORKED).stdout == "True\n"
    second.kill()


def test_end_of_the_server_ends_children_and_clients(unserved):
    with serving.serving("prefork_template:prepare"):
        process, child = sleeper()
    assert serving.python() == sys.executable
    assert process.wait(timeout=60) == -signal.SIGKILL
    until(lambda: not alive(child))


def test_all_end_when_the_owner_is_killed(unserved):
    program = (
        "import subprocess, time\nfrom bapo_openrlhf.cpu.prefork import serving\n"
        "with serving.serving('prefork_template:prepare'):\n"
        "    words = [serving.python(), '-c', 'import os, time; print(os.getpid(), os.getppid(), flush=True); "
        "time.sleep(600)']\n"
        "    subprocess.run(words)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child, server = map(int, owner.stdout.readline().split())
    assert alive(child) and alive(server)
    owner.kill()
    until(lambda: not alive(child) and not alive(server))


@pytest.mark.parametrize("end", ["at once", "later", "killed"])
def test_a_server_that_still_prepares_ends_with_its_owner_or_block(unserved, tmp_path, end):
    notes = tmp_path / "notes"
    wait = f"while not pathlib.Path({str(notes)!r}).exists(): time.sleep(0.05)"
    within = {"at once": "pass", "later": wait, "killed": f"{wait}\n    os.kill(os.getpid(), 9)"}
    program = (
        "import os, pathlib, time\nfrom bapo_openrlhf.cpu.prefork import serving\n"
        f"with serving.serving('prefork_template:hang'):\n    {within[end]}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0)
    if notes.exists():
        until(lambda: not alive(int(notes.read_text().split()[1])))


def test_other_environment_at_import_starts_python_itself(server):
    assert python("-c", FORKED, env={**os.environ, "FIXED": "2"}).stdout == "False\n"
    assert [word for word, _ in server()] == ["prepared"]


def test_failed_preparation_starts_python_itself_and_is_told(unserved):
    warned = pytest.warns(RuntimeWarning, match="RuntimeError: no such library")
    with warned, serving.serving("prefork_template:fail"):
        assert python("-c", FORKED).stdout == "False\n"


@pytest.mark.parametrize(("what", "says"), [("a long path", "long"), ("no right to execute", "Permission denied")])
def test_folder_that_cannot_be_used_starts_python_itself_and_is_told(unserved, tmp_path, monkeypatch, what, says):
    """Its path may be too long for a socket, or its file system may be mounted with noexec."""
    if what == "a long path":
        (tmp_path / ("long" * 30)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    else:
        monkeypatch.setattr(Path, "chmod", lambda path, mode: None)
    warned = pytest.warns(RuntimeWarning, match=f"no process is forked: .*{says}")
    with warned, serving.serving("prefork_template:prepare"):
        assert serving.python() == sys.executable


@pytest.mark.parametrize("sent", [b"{", b"[]", b'{"a": 1}', b"{}  "])
def test_files_of_a_request_that_cannot_be_read_are_closed(sent):
    """The client has left, or sends something else."""
    here, there = socket.socketpair()
    with here, there, open(os.devnull) as file:
        size = len(sent) + (sent == b"{")  # the client leaves before its last byte
        socket.send_fds(here, [size.to_bytes(HEAD, "big")], [file.fileno()])
        here.sendall(sent)
        here.shutdown(socket.SHUT_WR)
        before = os.listdir("/proc/self/fd")
        with pytest.raises((OSError, ValueError, TypeError)):
            read_request(there)
        assert os.listdir("/proc/self/fd") == before


def test_blocks_within_a_block_share_its_server(server):
    outer = serving.python()
    with serving.serving("prefork_template:fail"):
        assert serving.python() == outer
    assert serving.python() == outer and python("-c", FORKED).stdout == "True\n"


def test_process_of_multiprocessing_forks_and_gives_its_result(server):
    """As in vLLM: the start method is "spawn", and pipes and the file of the resource tracker are open."""
    program = (
        "import multiprocessing, sys\n"
        "from bapo_openrlhf.cpu.prefork import serving\n"
        "multiprocessing.set_executable(serving.python())\n"
        "import prefork_template\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    ours, theirs = context.Pipe()\n"
        "    process = context.Process(target=prefork_template.work, args=(theirs, [1, 2, 3]))\n"
        "    process.start(); theirs.close()\n"
        "    print(ours.recv()); process.join(); print(process.exitcode)\n"
    )
    done = python("-c", program)
    assert (done.stdout, done.stderr) == ("(6, True)\n3\n", "")


def test_title_of_a_forked_process_can_be_set(server):
    """Ray and vLLM name their processes. The title overwrites the memory of the first environment."""
    pytest.importorskip("setproctitle")
    program = "import setproctitle; setproctitle.setproctitle('ray::Named'); print(open('/proc/self/cmdline').read())"
    first = next(iter(os.environ))  # as PYTHONPATH is in `PYTHONPATH=FOLDER COMMAND`
    for environment in ({first: "changed"}, {}):
        assert python("-c", program, env=os.environ | environment).stdout.startswith("ray::Named"), first

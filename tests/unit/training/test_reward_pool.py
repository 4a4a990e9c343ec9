"""The reward pool with reward functions that hang, crash or cheat, in real processes."""

import hashlib
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.record.metrics import all_metrics
from bapo_openrlhf.training.engine import reward_pool
from bapo_openrlhf.training.engine import reward_worker as worker
from bapo_openrlhf.training.engine.reward_pool import RewardFailure, RewardPool
from bapo_openrlhf.training.wire.failures import OWN
from bapo_openrlhf.training.wire.packing import FIRST_RATIO
from bapo_openrlhf.training.wire.responses import STOPPED, VERSIONS
from bapo_openrlhf.training.wire.signals import NUMBERS, blocked

# A reward file that does what its label says: the label is code, which finds the query as `query` and leaves `result`.
OBEDIENT = """
import ctypes, io, os, re, resource, signal, subprocess, sys, threading, time

def reward_func(queries, prompts, labels):
    scope = {**globals(), "query": queries[0], "prompt": prompts[0]}
    exec(labels[0], scope)
    return scope["result"]
"""
CHILD = "open(query, 'w').write(str(subprocess.Popen(['sleep', '1000'], close_fds=False).pid))"
GOOD = "result = {'rewards': [0.5], 'extra_logs': {'pid': os.getpid()}}"


def exists(pid):
    """Whether a process runs. A dead process that nobody has waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_of(path):
    """The ids of the processes that were started for a reward file."""
    result = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(worker.__file__) in arguments and os.fsencode(path) in arguments and exists(entry.name):
            result.add(int(entry.name))
    return result


def eventually(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return held


def ask(pool, code, query=""):
    return pool.submit(query, "prompt", code, "").result()


def failure_of(pool, code, query=""):
    """The failure of a call that must fail."""
    with pytest.raises(RewardFailure) as caught:
        ask(pool, code, query)
    return caught.value


def pid_of(pool):
    return int(ask(pool, GOOD)["extra_logs"]["pid"])


@contextmanager
def opened(folder, source=OBEDIENT, *, processes=1, timeout=60.0, memory_gib=0.25):
    """A pool for a reward file with the given source. At the end the pool is closed and has left no process."""
    path = folder / "rewards.py"
    path.write_text(source)
    with closing(RewardPool(path, VerifierConfig(processes, timeout, memory_gib))) as pool:
        yield pool
    assert not workers_of(pool.path)


@pytest.fixture
def make_pool(tmp_path):
    with ExitStack() as stack:
        yield lambda *source, **options: stack.enter_context(opened(tmp_path, *source, **options))


def replies(data):
    return f"os.write(int(sys.argv[4]), {data}); time.sleep(1000)"


# (code, kind, what the message names, whether the worker is kept)
FAILURES = {
    "regex": ("re.match('(a+)+$', 'a' * 60 + 'b')", "timeout", "more than 1 s", False),
    "deaf to signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); time.sleep(1000)", "timeout", "more than 1 s", False,
    ),
    "os._exit(0)": ("os._exit(0)", "crashed", "exit status 0", False),
    "segfault": ("ctypes.string_at(0)", "crashed", "signal 11", False),
    "closes what is open": ("os.closerange(0, 1000); result = {'rewards': 1}", "crashed", "ended its process", False),
    "one large block": ("x = bytearray(300 << 20)", "memory", "0.25 GiB", False),
    "raises": ("raise KeyError('no such unit')", "raised", r"KeyError: 'no such unit'\n.*line \d", True),
    "sys.exit": ("sys.exit(4)", "raised", "SystemExit: 4", True),
    "error of 10 MB": ("raise ValueError('x' * 10_000_000)", "raised", "ValueError: xxx", True),
    "error of 200 MB": ("raise ValueError('x' * 200_000_000)", "memory", "0.25 GiB", False),
    "error with a surrogate": ("raise ValueError(chr(0xd800))", "raised", r"ValueError: \\ud800", True),
    "reads the terminal": ("input()", "raised", "EOFError", True),
    "None": ("result = None", "invalid", "None, a NoneType", True),
    "no rewards": ("result = {'scores': [1.0]}", "invalid", "a dict with rewards", True),
    "nan": ("result = {'rewards': [float('nan')]}", "invalid", r"rewards = \[nan\]", True),
    "beyond floats": ("result = {'rewards': 10**400}", "invalid", "rewards = 1000", True),
    "far beyond floats": ("result = {'rewards': 10**5000}", "invalid", "rewards = a", True),
    "str": ("result = {'rewards': ['1.0']}", "invalid", r"rewards = \['1.0'\]", True),
    "many values": ("result = {'rewards': [0.5] * 10**6}", "invalid", r"rewards = \[0.5, .*\.\.\.\]", True),
    "score nan": ("result = {'rewards': 1, 'scores': float('nan')}", "invalid", "scores = nan", True),
    "log of two": ("result = {'rewards': 1, 'extra_logs': {'digits': [1, 2]}}", "invalid", r"\['digits'\] = \[", True),
    "log of the run": (
        "result = {'rewards': 1, 'extra_logs': {'digits': 1, 'response_length': [3.0]}}",
        "invalid", r"extra_logs\['response_length'\]", True,
    ),
    "logs in a list": ("result = {'rewards': 1, 'extra_logs': [1]}", "invalid", r"extra_logs = \[1\]", True),
    "reply of 2 MB": (
        "result = {'rewards': 1, 'extra_logs': {'x' * 2_000_000: 1}}", "invalid", "longer than 1048576 bytes", False,
    ),
    "another reply": (replies("b'hello\\n'"), "invalid", "cannot be read", False),
    "deep reply": (replies("b'[' * 100_000 + b'\\n'"), "invalid", "cannot be read", False),
    "unknown reply": (replies("b'[\"bought\", 1, null]\\n'"), "invalid", "kind 'bought'", False),
}  # fmt: skip


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory):
    """A pool for the whole module, so that each test finds what the test before it left."""
    with opened(tmp_path_factory.mktemp("reward")) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty_pool(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("reward"), timeout=1.0) as pool:
        yield pool


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_named_and_the_next_call_is_served(one_pool, hasty_pool, name):
    code, kind, message, kept = FAILURES[name]
    pool = hasty_pool if kind == "timeout" else one_pool
    before, counted = pid_of(pool), pool.failures.kinds[kind]
    failure = failure_of(pool, code)
    assert failure.kind == kind and re.search(f"(?s){message}", str(failure))
    assert str(failure).startswith(f"{pool.path}: reward_func ") and len(str(failure)) < 5000
    str(failure).encode()  # can be printed
    assert pool.failures.kinds[kind] == counted + 1
    assert exists(before) == kept
    assert (pid_of(pool) == before) == kept
    assert len(workers_of(pool.path)) == 1


# (code, cause on one line); each is called more often than the one before
CAUSES = {
    "crashed": ("import os\n\ndef reward_func(q, p, l):\n    os._exit(3)\n", 3, "reward_func ended its process: exit"),
    "invalid": ("\n\ndef reward_func(q, p, l):\n    return None\n", 3, "reward_func returned None, a NoneType; it"),
    "raised": ("def reward_func(q, p, l):\n    helper(q)\n\ndef helper(q):\n    int(q[0])\n", 5,
               "reward_func raised ValueError: invalid literal for int() with base 10: 'a'"),
    "loading": ("x = 1\n\ndef reward_func(:\n", 3, "loading it raised SyntaxError: invalid syntax"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_each_failure_knows_file_and_line(make_pool, name):
    source, line, says = CAUSES[name]
    pool = make_pool(source)
    for query in "abb":  # another message each time is the same cause
        kind = failure_of(pool, "", query).kind
    assert dict(pool.failures.causes) == {(kind, f"{pool.path}:{line}"): 3}
    said = str(pool.failures)
    assert f"The commonest cause, 3 of 3: {says}" in said and said.endswith(f"({pool.path}:{line})")
    assert "\n" not in said


def test_children_of_the_function_go_with_it(one_pool, tmp_path):
    note = tmp_path / "pid"
    # A child that held the socket would hide the crash.
    assert failure_of(one_pool, f"{CHILD}\nos._exit(3)", str(note)).kind == "crashed"
    assert eventually(lambda: not exists(int(note.read_text())))


@pytest.mark.parametrize(("returned", "result"), [
    ("{'rewards': True, 'scores': [False]}", (1.0, 0.0, {})),
    ("{'rewards': ((0.25,),), 'scores': None, 'extra_logs': None}", (0.25, 0.25, {})),
    ("{'rewards': -2, 'scores': [3.5], 'extra_logs': {'a': [3], 'b': 1e300}}", (-2.0, 3.5, {"a": 3.0, "b": 1e300})),
    ("{'rewards': __import__('fractions').Fraction(1, 4), 'scores': 7}", (0.25, 7.0, {})),
    ("{'rewards': 0, 'extra_logs': {'none': [float('inf')]}}", (0.0, 0.0, {"none": math.inf})),
])  # fmt: skip
def test_results_are_plain_floats(one_pool, returned, result):
    actual = ask(one_pool, f"result = {returned}")
    assert actual == dict(zip(("rewards", "scores", "extra_logs"), result, strict=True))
    assert {type(actual["rewards"]), type(actual["scores"]), *map(type, actual["extra_logs"].values())} == {float}


def test_the_names_of_the_run_are_those_of_the_catalogue():
    """And those of a sample's `info`, of a row of the record and of OpenRLHF's log that are no metrics."""
    names = {metric.name for metric in all_metrics() if "/" not in metric.name}
    assert names | {*VERSIONS, STOPPED, FIRST_RATIO, "step", "generated_samples"} == OWN


def test_tensors_and_arrays(make_pool):
    pool = make_pool(
        "import numpy, torch\n"
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': torch.tensor([0.5], requires_grad=True),\n"
        "            'scores': torch.tensor([[0.25]], dtype=torch.bfloat16),\n"
        "            'extra_logs': {'zero_dim': torch.tensor(3), 'listed': [torch.tensor(4.0)],\n"
        "                           'array': numpy.array([5]), 'scalar': numpy.float32(6)}}\n"
    )
    logs = {"zero_dim": 3.0, "listed": 4.0, "array": 5.0, "scalar": 6.0}
    assert ask(pool, "") == {"rewards": 0.5, "scores": 0.25, "extra_logs": logs}


DIGEST = """
import hashlib, json
def digest(text):
    return int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12], 16)
def reward_func(queries, prompts, labels, responses):
    (query,), (prompt,), (response,) = queries, prompts, responses
    return {"rewards": digest(query), "scores": digest(prompt),
            "extra_logs": {"label": digest(json.dumps(labels, sort_keys=True)), "written": digest(response)}}
"""


@pytest.fixture(scope="module")
def digest_pool(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("reward"), DIGEST, memory_gib=1.0) as pool:
        yield pool


def digest(text):
    return float(int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12], 16))


any_text = st.text(st.characters(exclude_categories=()))  # surrogates too
HOSTILE = '\n\r\n\x85\u2028\0\ud800\ud83d\ude00\ufeff\U0010ffff"]\n["result", 1]\n'


@given(any_text, any_text, any_text)
@example(HOSTILE, HOSTILE, HOSTILE)
@example("é\n" * 5_000_000, "", "")
@settings(max_examples=3 * settings.default.max_examples)
def test_any_text_arrives_as_it_is(digest_pool, query, prompt, response):
    result = digest_pool.submit(query, prompt, query, response).result()
    assert (result["rewards"], result["scores"]) == (digest(query), digest(prompt))
    assert result["extra_logs"]["written"] == digest(response)


@pytest.mark.parametrize("label", ["7", 7, 7.5, None, True, ["a", 1], {"tests": [{"in": "1\n", "out": "\ud800"}]}])
def test_labels_arrive(digest_pool, label):
    expected = digest(json.dumps([label], sort_keys=True))
    assert digest_pool.submit("q", "p", label, "").result()["extra_logs"]["label"] == expected


def test_other_labels_are_refused_at_once(make_pool):
    pool = make_pool()
    for label in (object(), {1, 2}, b"x", {"a": 1j}):
        with pytest.raises(TypeError, match=f"label of type {type(label).__name__} "):
            ask(pool, label)
    assert not workers_of(pool.path) and not pool.failures.kinds


def test_a_request_too_large_for_the_limit_is_a_memory_failure(make_pool):
    pool = make_pool(memory_gib=0.03)
    assert failure_of(pool, GOOD, "x" * 100_000_000).kind == "memory"
    pid_of(pool)


def test_one_answer_even_where_the_function_forks(one_pool):
    before = pid_of(one_pool)
    assert ask(one_pool, "os.fork(); result = {'rewards': 0.125}")["rewards"] == 0.125
    for _ in range(20):
        assert pid_of(one_pool) == before


def test_only_a_reply_has_a_limit_and_not_what_is_read_together(make_pool, monkeypatch):
    monkeypatch.setattr(reward_pool, "MAX_REPLY", 2000)
    reply_and_more = """b'["result", {"rewards": 9.0}, 1]\\n' + b'[' * 1999"""
    assert ask(make_pool(), f"os.write(int(sys.argv[4]), {reply_and_more})\n{GOOD}")["rewards"] == 9.0


def test_a_worker_that_talks_unasked_is_replaced(make_pool):
    pool = make_pool()
    late = """b'["result", {"rewards": 9.0, "scores": 9.0, "extra_logs": {"pid": 0}}]\\n'"""
    ask(pool, f"threading.Timer(0.3, os.write, (int(sys.argv[4]), {late})).start()\n{GOOD}")
    talker = pid_of(pool)
    time.sleep(1.0)
    assert ask(pool, GOOD)["rewards"] == 0.5
    assert not exists(talker)


@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_that_does_not_read_its_request(make_pool, killed):
    """The request is larger than the socket's buffer, so the parent is still sending. Another process answers it."""
    pool = make_pool(timeout=60 if killed else 2)
    stopped = pid_of(pool)
    os.kill(stopped, signal.SIGSTOP)
    if killed:
        threading.Timer(1, os.kill, (stopped, signal.SIGKILL)).start()
        assert ask(pool, GOOD, "x" * 10_000_000)["rewards"] == 0.5
    else:
        assert failure_of(pool, GOOD, "x" * 10_000_000).kind == "timeout"
    assert not exists(stopped)
    pid_of(pool)


def test_a_call_whose_process_is_killed_from_outside_is_asked_once_more(make_pool, tmp_path):
    """Other calls that were sent with it are answered too. A call that is killed each time fails."""
    pool, asked = make_pool(), tmp_path / "asked"
    tries = f"open({str(asked)!r}, 'a').write('x'); "
    once = f"{tries}len(open({str(asked)!r}).read()) > 1 or os.kill(os.getpid(), signal.SIGKILL); {GOOD}"
    calls = [pool.submit("", "prompt", code, "") for code in (GOOD, once, GOOD)]
    assert [call.result()["rewards"] for call in calls] == [0.5] * 3
    assert not pool.failures.kinds and asked.read_text() == "xx"
    failure = failure_of(pool, f"{tries}os.kill(os.getpid(), signal.SIGKILL)")
    assert failure.kind == "crashed" and "killed by signal 9" in str(failure) and asked.read_text() == "xxxx"


def test_a_process_that_is_killed_while_it_loads_is_started_once_more(make_pool, tmp_path):
    asked = tmp_path / "asked"
    source = (
        f"import os\nopen({str(asked)!r}, 'a').write('x')\n"
        f"len(open({str(asked)!r}).read()) > 1 or os.kill(os.getpid(), 9)\n{OBEDIENT}"
    )
    assert ask(make_pool(source), GOOD)["rewards"] == 0.5
    assert asked.read_text() == "xx"


FORK = "import multiprocessing as mp; child = mp.get_context('fork').Process(target=time.sleep, args=(600,))"


@pytest.mark.parametrize(("start", "code"), [
    ("child = subprocess.Popen(['sleep', '600'])", "child.wait()"),
    (f"{FORK}; child.start()", "child.join() or child.exitcode"),
])  # fmt: skip
def test_a_signal_to_all_processes_ends_none_and_programs_of_the_function_end_by_it(make_pool, start, code):
    """As a scheduler sends it. The pool's own process has blocked the signals, as an engine has."""
    with blocked():
        pool = make_pool()
        process = pid_of(pool)
    for number in NUMBERS:
        os.kill(process, number)
    assert ask(pool, f"{start}; child.terminate(); result = {{'rewards': {code}}}")["rewards"] == -signal.SIGTERM
    assert pid_of(pool) == process


def test_alarms_work(one_pool):
    """The function runs in the main thread; an alarm that it leaves on does not go off later."""
    code = """
class TooSlow(Exception): pass
def handler(number, frame): raise TooSlow
signal.signal(signal.SIGALRM, handler)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    while True: time.time()
except TooSlow:
    result = {'rewards': 0.75}
signal.setitimer(signal.ITIMER_REAL, 0.6)
"""
    before = pid_of(one_pool)
    assert ask(one_pool, code)["rewards"] == 0.75
    time.sleep(1)
    assert pid_of(one_pool) == before


def test_loaded_libraries_do_not_count_as_memory(make_pool):
    pool = make_pool("library = bytearray(250 << 20)\n" + OBEDIENT, memory_gib=0.125)
    before = pid_of(pool)
    assert ask(pool, f"x = bytearray(100 << 20)\n{GOOD}")["extra_logs"]["pid"] == before
    assert failure_of(pool, f"x = bytearray(150 << 20)\n{GOOD}").kind == "memory"


def test_the_function_cannot_lift_its_limits(make_pool):
    lift = "resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)"
    with pytest.raises(RewardFailure, match="not allowed to raise maximum limit"):
        # The superuser may.
        ask(make_pool(), f"if os.getuid() == 0: os.setuid(65534)\n{lift}")


def test_a_crash_leaves_no_core_file(make_pool):
    _, hard = before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        assert ask(make_pool(), "result = {'rewards': resource.getrlimit(resource.RLIMIT_CORE)[1]}")["rewards"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize("threads", [None, "3"])
def test_one_thread_for_numerics_unless_told_otherwise(make_pool, monkeypatch, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    pool = make_pool()
    assert ask(pool, "result = {'rewards': int(os.environ['OMP_NUM_THREADS'])}")["rewards"] == float(threads or 1)


def test_modules_are_found_as_in_the_parent(make_pool, tmp_path, monkeypatch):
    """A file on sys.path can be imported, but a file of the working directory does not replace a module."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "grading_helpers.py").write_text("VALUE = 0.625\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    pool = make_pool(
        "import json, grading_helpers\ndef reward_func(*args): return {'rewards': grading_helpers.VALUE}\n"
    )
    assert ask(pool, "")["rewards"] == 0.625


def test_what_is_printed_comes_through_and_cannot_get_between(make_pool, capfd, monkeypatch):
    """Also what is printed by loading, by a program, and by a call that is killed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pool = make_pool("print('loaded')\n" + OBEDIENT, timeout=2)
    ends = ("while True: pass", "os._exit(3)", "raise OSError")
    for end in ends:
        failure_of(pool, f"print('last of', {end!r})\n{end}")
    reply = '["result", {"rewards": 9, "scores": 9, "extra_logs": {}}]'
    for code in (
        f"print('{reply}'); os.write(1, b'garbage {{[\\n'); os.system('echo from a shell')",
        "print('an error', file=sys.stderr); sys.stdout = io.StringIO(); print('nowhere')",
        f"sys.stdout = sys.stderr = sys.stdin = None; os.write(2, b'{reply}\\n')",
        "sys.__stdout__.close(); os.closerange(0, 3)",
        "",
    ):
        assert ask(pool, f"{code}\n{GOOD}")["rewards"] == 0.5
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line != "loaded"]  # by each new process
    assert lines == [*(f"last of {end}" for end in ends), reply, "garbage {[", "from a shell", "an error", reply]
    assert out == ""


@pytest.mark.parametrize("ends", ["", "while True: print('x' * 999)", "os._exit(3)"])
def test_a_call_that_prints_much_is_cut_and_says_so(make_pool, capfd, ends):
    pool = make_pool(timeout=1 if "while" in ends else 60)
    many = f"for n in range(3000): print('line', n, 'x' * 200)\n{ends}\n{GOOD}"
    if ends:
        failure_of(pool, many)
    else:
        assert ask(pool, many)["rewards"] == 0.5
    ask(pool, f"print('short')\n{GOOD}")
    _, err = capfd.readouterr()
    whole = "".join(f"line {n} {'x' * 200}\n" for n in range(3000))
    assert err.startswith(whole[:4096]) and err.endswith("short\n")
    (said,) = re.findall(rf"{pool.path}: ([\d,]+) bytes that its code printed are left out; the first 4,096 of a", err)
    left_out = int(said.replace(",", ""))
    assert left_out > len(whole) if "while" in ends else left_out == len(whole) - 4096
    assert len(err) < 4096 + 300


def test_of_calls_that_travel_together_each_may_print(make_pool, tmp_path, in_one_exchange, capfd):
    pool = make_pool()
    calls = [f"print('call', {n}, 'x' * 1000)\n{GOOD}" for n in range(20)]
    in_one_exchange(pool, calls, tmp_path)
    _, err = capfd.readouterr()
    assert [line.split()[1] for line in err.splitlines()] == list(map(str, range(20)))


@pytest.mark.parametrize(("source", "kind", "message"), [
    ("x = 1\n", "raised", "raised AttributeError"),
    ("import os; os._exit(7)\n", "crashed", "ended its process: exit status 7"),
    ("import time; time.sleep(1000)\n", "timeout", "took more than 2 s"),
])  # fmt: skip
def test_a_file_that_does_not_load(make_pool, monkeypatch, source, kind, message):
    monkeypatch.setattr(reward_pool, "LOADING", 2 if kind == "timeout" else 60)
    pool = make_pool(source)
    failure = failure_of(pool, GOOD)
    assert failure.kind == kind and str(failure).startswith(f"{pool.path}: loading it {message}")
    assert pool.failures.kinds == {kind: 1}
    assert not workers_of(pool.path)
    Path(pool.path).write_text(OBEDIENT)
    os.utime(pool.path, (1, 1))  # so that no cached bytecode is taken for it
    assert ask(pool, GOOD)["rewards"] == 0.5


def test_loading_is_not_part_of_a_call(make_pool):
    pool = make_pool("import time; time.sleep(1.5)\n" + OBEDIENT, timeout=1)
    assert ask(pool, GOOD)["rewards"] == 0.5


def test_many_threads_get_their_own_answers(make_pool):
    pool, counts = make_pool(processes=3, timeout=60), []

    def outcome(n):
        ending = ("", "os._exit(1)", "raise ValueError", "")[n % 4]
        call = pool.submit("", "", f"time.sleep({n % 7} / 1000)\n{ending}\nresult = {{'rewards': {n}}}", "")
        failure = call.exception()
        counts.append(len(workers_of(pool.path)))
        return failure.kind if failure else call.result()["rewards"]

    with ThreadPoolExecutor(12) as threads:
        outcomes = list(threads.map(outcome, range(120)))
    assert outcomes == [(n, "crashed", "raised", n)[n % 4] for n in range(120)]
    assert pool.failures.kinds == {"crashed": 30, "raised": 30}
    assert 2 <= max(counts) <= 3


@pytest.fixture
def exchanges(monkeypatch):
    """How many requests each exchange with a process has."""
    sizes = []
    ask_worker = reward_pool._Worker.ask

    def noted(self, requests, seconds):
        sizes.append(len(requests))
        return ask_worker(self, requests, seconds)

    monkeypatch.setattr(reward_pool._Worker, "ask", noted)
    return sizes


@pytest.fixture
def in_one_exchange(exchanges, monkeypatch):
    """Sends these labels to one process together, behind a call that waits for them. Returns what becomes of each."""
    monkeypatch.setattr(reward_pool, "TOGETHER", 1000.0)

    def send(pool, codes, folder):
        pool._seconds = 1e-3  # as after quick calls
        first = pool.submit(f"{folder}/go", "", f"while not os.path.exists(query): time.sleep(0.01)\n{GOOD}", "")
        assert eventually(first.running)
        calls = [pool.submit("", "", code, "") for code in codes]
        (folder / "go").touch()
        for call in [first, *calls]:
            call.exception()  # waits
        assert exchanges[:3] == [1, 1, len(codes)]  # the file, the call that waits, all others
        return [first.result(), *(call.exception() or call.result() for call in calls)]

    return send


@pytest.mark.parametrize("name", ["regex", "os._exit(0)", "one large block", "raises", "None"])
def test_one_that_fails_fails_alone_among_those_sent_together(make_pool, tmp_path, in_one_exchange, name):
    code, kind, _, kept = FAILURES[name]
    pool = make_pool(timeout=2 if kind == "timeout" else 60)
    numbered = [f"result = {{'rewards': {n}, 'extra_logs': {{'pid': os.getpid()}}}}" for n in range(5)]
    first, *result = in_one_exchange(pool, [*numbered[:2], code, *numbered[2:4], code, numbered[4]], tmp_path)
    assert [result[place].kind for place in (2, 5)] == [kind] * 2 and pool.failures.kinds == {kind: 2}
    good = [result[place] for place in (0, 1, 3, 4, 6)]
    assert [answer["rewards"] for answer in good] == [0, 1, 2, 3, 4]
    pids = [answer["extra_logs"]["pid"] for answer in (first, *good)]
    assert pids[0] == pids[1] == pids[2] and pids[3] == pids[4]
    assert len(set(pids)) == (1 if kept else 3)


def test_a_process_that_is_killed_while_its_answer_is_read_answers_no_call_twice(
    make_pool, tmp_path, in_one_exchange, monkeypatch
):
    """Its thread must stop reading answers if it has given back the calls that are left."""
    ended, kills = reward_pool._Worker.ended, []

    def kill_once(self):
        if sys._getframe(1).f_code.co_name == "_serve" and self._count > 2 and not kills:
            kills.append(self.kill())
        return ended(self)

    monkeypatch.setattr(reward_pool._Worker, "ended", kill_once)
    answers = in_one_exchange(make_pool(), [GOOD] * 5, tmp_path)
    assert kills and [answer["rewards"] for answer in answers] == [answers[0]["rewards"]] * 6


def test_each_of_those_sent_together_has_its_own_time(make_pool, tmp_path, in_one_exchange):
    pool = make_pool(timeout=2)
    result = in_one_exchange(pool, [f"time.sleep(0.8)\n{GOOD}"] * 4, tmp_path)
    assert [answer["rewards"] for answer in result] == [0.5] * 5 and not pool.failures.kinds


def test_an_answer_that_comes_twice_is_not_that_of_the_next_call(make_pool, tmp_path, in_one_exchange):
    pool = make_pool()
    again = """b'["result", {"rewards": 9.0, "scores": 9.0, "extra_logs": {}}, 2]\\n'"""
    twice = f"os.write(int(sys.argv[4]), {again})\n"
    result = in_one_exchange(pool, [twice + GOOD, GOOD, GOOD], tmp_path)
    assert [answer["rewards"] for answer in result] == [0.5, 9.0, 0.5, 0.5] and not pool.failures.kinds


def test_slow_calls_are_not_sent_together(make_pool, exchanges):
    pool = make_pool()
    calls = [pool.submit("", "", f"time.sleep(0.1)\n{GOOD}", "") for _ in range(6)]
    assert [call.result()["rewards"] for call in calls] == [0.5] * 6
    assert set(exchanges) == {1}


def test_only_as_many_processes_as_calls_at_the_same_time(make_pool, tmp_path):
    """A process outlives the thread that called first."""
    pool, pids = make_pool(processes=4), set()
    assert not workers_of(pool.path)
    for _ in range(10):
        with ThreadPoolExecutor(1) as thread:
            pids.add(thread.submit(pid_of, pool).result())
    time.sleep(0.2)
    assert {pid_of(pool)} == pids == workers_of(pool.path)
    meet = f"open(query + str(os.getpid()), 'w')\nwhile len(os.listdir(query)) < 2: time.sleep(0.01)\n{GOOD}"
    (tmp_path / "met").mkdir()
    pool._seconds = 1.0  # as after slow calls, which are not sent together
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: ask(pool, meet, f"{tmp_path}/met/"), range(2)))
    assert workers_of(pool.path) == {answer["extra_logs"]["pid"] for answer in both} > pids


def test_failures_leave_no_file_open(make_pool):
    pool = make_pool()
    pid_of(pool)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        failure_of(pool, "os._exit(1)")
    pid_of(pool)
    assert len(os.listdir("/proc/self/fd")) == before
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2  # the process's socket, and the pipe of what it prints


def test_close_ends_all_calls(make_pool):
    pool = make_pool(processes=2, timeout=600)
    calls = [pool.submit("", "", "time.sleep(1000)", "") for _ in range(5)]  # two at work, three waiting
    assert eventually(lambda: len(workers_of(pool.path)) == 2)
    time.sleep(0.3)
    pool.close()
    assert not workers_of(pool.path)
    assert [type(call.exception(30)) for call in calls] == [RuntimeError] * 5
    pool.close()
    with pytest.raises(RuntimeError, match=r"reward pool of .* is closed"):
        ask(pool, GOOD)
    assert not workers_of(pool.path) and not pool.failures.kinds


PARENT = """
import sys, threading
from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.training.engine.reward_pool import RewardPool
pool = RewardPool(sys.argv[1], VerifierConfig(processes=2, timeout=600, memory_gib=1))
pool.submit(sys.argv[2], "", sys.argv[3], "").result()
"""


def test_the_end_of_the_program_ends_the_workers(tmp_path):
    path, note = tmp_path / "obedient.py", tmp_path / "pid"
    path.write_text(OBEDIENT)
    subprocess.run([sys.executable, "-c", PARENT, path, note, f"{CHILD}\n{GOOD}"], check=True, timeout=60)
    assert not workers_of(path)
    assert eventually(lambda: not exists(int(note.read_text())))


@pytest.mark.parametrize("work", ["re.match('(a+)+$', 'a' * 60 + 'b')", "time.sleep(1000)", None])
def test_workers_of_a_killed_parent_go_too(tmp_path, work):
    """A process that is stuck in C code dies too, although it could not notice anything itself."""
    path, note = tmp_path / "obedient.py", tmp_path / "at work"
    path.write_text(OBEDIENT)
    code = GOOD if work is None else f"{work}\n{GOOD}"
    script = PARENT + f"pool.submit('', '', {code!r}, '')\n"
    script += "import time; time.sleep(0.5); open(sys.argv[2], 'w').close(); time.sleep(1000)\n"
    with subprocess.Popen([sys.executable, "-c", script, path, note, GOOD]) as parent:
        try:
            assert eventually(note.exists)
            assert workers_of(path)
        finally:
            parent.kill()
    assert eventually(lambda: not workers_of(path))


def run_worker(path, parent, *, requests=b""):
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, worker.__file__, path, str(2**28), str(parent), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    with ours:
        ours.sendall(requests)
        ours.shutdown(socket.SHUT_WR)
        _, err = process.communicate(timeout=60)
        try:
            replies = ours.recv(10_000)
        except ConnectionResetError:  # it ended without reading the requests
            replies = b""
        return process.returncode, err, replies


def test_a_worker_ends_quietly_with_its_requests(tmp_path):
    path = tmp_path / "obedient.py"
    # A thread of the file's own must not keep it.
    path.write_text(OBEDIENT + "threading.Thread(target=time.sleep, args=(1000,)).start()\n")
    assert run_worker(path, os.getpid(), requests=worker.encode([0, sys.path])) == (
        0,
        b"",
        f'["result", "{path}:4", 0]\n'.encode(),
    )


def test_a_worker_whose_parent_is_gone_does_not_start(tmp_path):
    path = tmp_path / "note.py"
    path.write_text("print('loaded')\n")
    assert run_worker(path, 1, requests=worker.encode([0, sys.path])) == (0, b"", b"")

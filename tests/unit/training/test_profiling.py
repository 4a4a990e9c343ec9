"""Profiles: which steps they cover, which part of Ray's time line, and how the seconds add up."""

import gzip
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.openrlhf_flags import check_combinations
from bapo_openrlhf.training import profiling
from bapo_openrlhf.training.profiling import Profile, Trace, busy_seconds, calls_within, start_trace, stop_trace


def call(name, first, last, **more):
    return {"ph": "X", "name": name, "ts": first * 1e6, "dur": (last - first) * 1e6, **more}


# ── The time line ──


def test_calls_are_cut_to_the_window():
    events = [
        call("before", 0, 9), call("into", 8, 12, tid="w1"), call("within", 12, 13), call("over", 5, 25),
        call("out of", 18, 30), call("after", 20, 21), {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    found = calls_within(events, 10, 20)
    assert found == [
        call("into", 10, 12, tid="w1"),
        call("within", 12, 13),
        call("over", 10, 20),
        call("out of", 18, 20),
    ]


spans = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(1, 10)), max_size=15)


@given(spans)
def test_busy_seconds_count_each_second_once(found):
    """The busy seconds by brute force over whole seconds."""
    busy = busy_seconds([call(name, first, first + length) for name, first, length in found])
    expected = {
        name: len(
            {second for other, first, length in found if other == name for second in range(first, first + length)}
        )
        for name in {name for name, *_ in found}
    }
    assert busy == pytest.approx(expected)
    assert list(busy.values()) == sorted(busy.values(), reverse=True)


# ── One process ──


def test_trace_of_a_process_has_what_it_did(tmp_path):
    profiler = start_trace()
    matrix = torch.randn(300, 300)
    for _ in range(5):
        matrix = matrix @ matrix
    trace = stop_trace(profiler, str(tmp_path), "actor_rank3")
    assert trace.process == "actor_rank3"
    counts = {name: count for name, _, count in trace.operators}
    assert counts["aten::mm"] == 5
    times = [seconds for _, seconds, _ in trace.operators]
    assert times == sorted(times, reverse=True) and len(times) <= profiling.OPERATORS
    with gzip.open(tmp_path / "actor_rank3.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 5
    whole = sum(event["dur"] for event in events if event.get("name") == "aten::mm") / 1e6
    own = {name: seconds for name, seconds, _ in trace.operators}["aten::mm"]
    assert whole / 2 < own <= whole * 1.01  # a matrix product hardly calls anything else


# ── The window ──


class Refs:
    """A stand-in for Ray, in which a call is its result."""

    def __init__(self):
        self.calls = []

    def group(self, ranks):
        owner = self

        class Group:
            def async_run_method(self, method_name, **words):
                owner.calls.append((method_name, words.get("model")))
                if method_name == "stop_trace":
                    return [Trace(f"{words['model']}_rank{rank}", [("aten::mm", 0.5, 3)]) for rank in range(ranks)]
                return [None] * ranks

        return Group()

    def engine(self):
        owner = self

        class Method:
            def __init__(self, name):
                self.name = name

            def remote(self, *args):
                owner.calls.append((self.name, *args[1:]))
                return [Trace(f"engine{args[1]}_rank0", [("aten::linear", 0.25, 7)])] if args else None

        class Engine:
            start_trace = Method("start_trace")
            stop_trace = Method("stop_trace")

        return Engine()


@pytest.fixture
def remote(monkeypatch):
    clock = iter(range(100, 200, 4))
    monkeypatch.setattr(profiling.ray, "get", lambda refs: refs)
    monkeypatch.setattr(profiling.time, "time", lambda: next(clock))
    monkeypatch.setattr(profiling, "ray_timeline", lambda: [call("task::fit", 90, 102), call("task::other", 0, 50)])
    return Refs()


def windows(remote, folder, steps, run):
    """The steps after which something started and stopped."""
    groups = {"actor": remote.group(2), "critic": None, "reference": remote.group(1)}
    profile = Profile(folder, steps, groups, [remote.engine(), remote.engine()])
    seen = []
    for step in range(1, run + 1):
        before = len(remote.calls)
        profile.step_ended()
        seen += [(step, *name) for name in remote.calls[before:]]
    before = len(remote.calls)
    profile.finish()
    return seen + [("end", *name) for name in remote.calls[before:]]


STARTED = [("start_trace", None), ("start_trace", None), ("start_trace",), ("start_trace",)]
STOPPED = [("stop_trace", "actor"), ("stop_trace", "reference"), ("stop_trace", 0), ("stop_trace", 1)]


@pytest.mark.parametrize(
    ("steps", "run", "stops"),
    [(1, 9, 3), (3, 9, 5), (3, 5, 5), (3, 4, "end"), (5, 2, "end"), (3, 1, None), (0, 9, None)],
)
def test_window_begins_after_two_steps_and_has_so_many(remote, tmp_path, steps, run, stops):
    found = windows(remote, tmp_path, steps, run)
    expected = [(2, *call) for call in STARTED] + [(stops, *call) for call in STOPPED] if stops else []
    assert found == expected
    assert (tmp_path / "profile" / "summary.md").exists() is bool(stops)


def test_page_and_files(remote, tmp_path):
    windows(remote, tmp_path, 2, 8)
    page = (tmp_path / "profile" / "summary.md").read_text()
    assert "# Profile of 2 steps\n\n4 s, 2 s each" in page
    assert "| `task::fit` | 2.000 | 50.0% |" in page and "task::other" not in page
    for process in ("actor_rank0", "actor_rank1", "reference_rank0"):
        assert f"## {process}\n" in page
    assert page.count("| `aten::mm` | 0.500 | 12.5% | 3 |") == 3
    assert page.count("| `aten::linear` | 0.250 | 6.2% | 7 |") == 2
    with gzip.open(tmp_path / "profile" / "calls.json.gz", "rt") as file:
        (only,) = json.load(file)
    assert math.isclose(only["dur"], 2e6)


# ── The flag ──

WORDS = ["--actor.model_name_or_path=model", "--reward.remote_url=reward.py", "--rollout.n_samples_per_prompt=4"]


def test_negative_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match=r"run\.profile_steps is -1; it must be at least 0"):
        arguments.parse([*WORDS, "--run.profile_steps", "-1"])


def test_asynchronous_run_has_no_profile():
    args = arguments.parse([*WORDS, "--algorithm", "grpo", "--train.async_enable", "--run.profile_steps", "2"])
    with pytest.raises(ConfigError, match=r"run\.profile_steps is 2; with train\.async_enable it must be 0"):
        check_combinations(args)

"""The runner of decision_design.md: what it refuses to mix, and that it goes on where it stopped. No run is real."""

import signal
import subprocess
from dataclasses import replace

import decision_runs as runner
import decision_stages as stages
import pytest
from hard_prompts import SOLVED
from made_runs import MADE, flag, write_run

from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.workbench.study.runner import Outcome

SEARCH = stages.Stage("search", 1, "best_rates", (201,), {"plain": 1.0}, grid=(1e-4, 2e-4))
AFTER = stages.Stage("after", 1, "best_rates", (61, 62), {"plain": 1.0, "in_denominator": 1.0}, rates_from="search")
XEON, EPYC = MADE["cpu"], "EPYC, avx2"


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A study of two small stages on a clean commit. Returns the names of the runs, in order."""
    names = []
    monkeypatch.setattr(stages, "STAGES", (SEARCH, AFTER))
    monkeypatch.setattr(runner, "unpack_model", lambda root: None)
    monkeypatch.setattr(runner, "require_base", lambda: None)
    monkeypatch.setattr(runner, "run_command", lambda command, root: None)
    monkeypatch.setattr(runner.record, "provenance", lambda: dict(MADE))

    def run_stage(stage, runs, here, root, until):
        for run in here:
            names.append(run.name)
            cpu = runner.record.provenance()["cpu"]
            write_run(run, 0.6 if flag(run, stages.RATE) == "0.0001" else 0.3, cpu=cpu)
        return True

    monkeypatch.setattr(runner, "run_stage", run_stage)
    return names


def origin(arm="a", seed=1, commit="c1", cpu=XEON, versions="torch 2"):
    return runner.Origin(arm, seed, commit, cpu, versions)


@pytest.mark.parametrize(
    ("ones", "words"),
    [
        ([origin(), origin(seed=2), origin("b", commit="c2", versions="torch 3")], []),  # other arms may differ
        ([origin(), origin(seed=2, commit="c2")], ["arm a", "commit", "c1; c2"]),
        ([origin(), origin(seed=2, versions="torch 3")], ["arm a", "versions", "torch 2; torch 3"]),
        ([origin(), origin("b", cpu=EPYC)], ["seed 1", "cpu", EPYC]),
        ([origin(), origin(seed=2, cpu=EPYC), origin("b", 2, cpu=EPYC)], []),  # other pairs may differ
    ],
)
def test_mixtures(ones, words):
    found = runner.mixtures(ones)
    assert len(found) == bool(words) and all(word in found[0] for word in words)


def test_stages_run_in_order_and_the_rates_are_passed_on(small, tmp_path):
    assert runner.run(tmp_path, None) == 0
    arms = ("plain-group", "in_denominator-group")
    rates = ("0.0001", "0.0002", "0.00005")  # the best of the first two was the lowest, so one more
    assert small == [f"plain_{rate}-group-s201" for rate in rates] + [
        f"{arm}-s{seed}" for seed in (61, 62) for arm in arms]  # fmt: skip
    assert {flag(run, stages.RATE) for run in stages.planned(AFTER, tmp_path)} == {"0.0001"}
    small.clear()
    assert runner.run(tmp_path, None) == 0 and small == []


def test_an_interrupted_study_makes_each_run_once(small, tmp_path, monkeypatch):
    whole, made_ = runner.run_stage, write_run
    counted = []

    def stops(run, *args, **kwargs):
        if len(counted) in (1, 4) and run.name not in counted:
            counted.append(run.name)
            raise KeyboardInterrupt
        made_(run, *args, **kwargs)

    monkeypatch.setitem(whole.__globals__, "write_run", stops)
    for _ in range(2):
        counted += [""] * (1 - len(counted) if not counted else 4 - len(counted))
        with pytest.raises(KeyboardInterrupt):
            runner.run(tmp_path, None)
    assert runner.run(tmp_path, None) == 0
    done = [run.name for stage in (SEARCH, AFTER) for run in stages.planned(stage, tmp_path) if run.done]
    assert sorted(set(small)) == sorted(done) and len(small) == len(done) + 2  # two were interrupted, and made again


def test_a_dirty_worktree_is_refused(small, tmp_path, monkeypatch):
    for commit in (None, "a" * 40 + "-dirty"):
        monkeypatch.setattr(runner.record, "provenance", lambda commit=commit: {**MADE, "commit": commit})
        with pytest.raises(ConfigError, match="without changes"):
            runner.run(tmp_path, None)
    assert small == []


@pytest.mark.parametrize("changed", [{"commit": "b" * 40}, {"versions": {"torch": "3"}}])
def test_an_arm_that_would_be_mixed_is_refused(small, tmp_path, monkeypatch, changed):
    runner.run(tmp_path, None)
    gone = next(run for run in stages.planned(AFTER, tmp_path) if run.seed == 62)
    (gone.folder / "summary.json").unlink()
    monkeypatch.setattr(runner.record, "provenance", lambda: {**MADE, **changed})
    with pytest.raises(ConfigError, match="stage after: arm plain-group has runs of 2 values"):
        runner.run(tmp_path, None)


def test_an_arm_without_runs_may_begin_at_another_commit(small, tmp_path, monkeypatch):
    runner.run(tmp_path, None)
    for run in stages.planned(AFTER, tmp_path):
        if run.arm.method == "in_denominator":
            (run.folder / "summary.json").unlink()
    small.clear()
    monkeypatch.setattr(runner.record, "provenance", lambda: {**MADE, "commit": "b" * 40})
    assert runner.run(tmp_path, None) == 0 and small == ["in_denominator-group-s61", "in_denominator-group-s62"]


def test_seeds_wait_for_the_kind_of_cpu_on_which_they_have_begun(small, tmp_path, monkeypatch, capsys):
    runner.run(tmp_path, None)
    for run in stages.planned(AFTER, tmp_path):
        if run.seed == 62 or run.arm.method == "in_denominator":
            (run.folder / "summary.json").unlink()
    small.clear()
    monkeypatch.setattr(runner.record, "provenance", lambda: {**MADE, "cpu": EPYC})
    assert runner.run(tmp_path, None) == 0
    assert small == ["plain-group-s62", "in_denominator-group-s62"]
    assert "in_denominator-group-s61 wait for the CPU" in capsys.readouterr().out


def test_runs_that_are_compared_with_another_stage_wait_for_its_kind_of_cpu(small, tmp_path):
    runner.run(tmp_path, None)
    runs = stages.planned(AFTER, tmp_path)
    later = [replace(run, folder=tmp_path / "later" / run.name) for run in runs]
    assert runner.of_this_cpu(later, EPYC, runs) == ([], later)
    assert runner.of_this_cpu(later, XEON, runs) == runner.of_this_cpu(later, EPYC) == (later, [])


def test_a_stage_waits_for_a_search_that_has_not_ended(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "of_this_cpu", lambda runs, *_: ([], list(runs)))  # another CPU has begun it
    assert runner.run(tmp_path, None) == 1
    assert "search has not ended for plain; stage after has to wait" in capsys.readouterr().out


# ── the runs of one stage ──


@pytest.fixture
def one_by_one(monkeypatch, tmp_path):
    """`run_stage` without Ray. What is in `fails` ends with an error."""
    from contextlib import contextmanager

    from bapo_openrlhf.launch import start

    begun, fails = [], set()

    @contextmanager
    def nothing(*_):
        yield {}

    @contextmanager
    def unseen(*_):
        yield lambda running, ended: None

    def run_all(planned, *, parallel, environment, until, callback):
        if until is not None:
            return Outcome(left=len(planned))
        for first in range(0, len(planned), parallel):
            runs = planned[first : first + parallel]
            for run in runs:
                begun.append(run.name)
                run.folder.mkdir(parents=True, exist_ok=True)
                if run.name not in fails:
                    write_run(run, 0.5)
            callback([], runs)
        return Outcome(done=len(planned))

    monkeypatch.setattr(start, "shared_ray", nothing)
    monkeypatch.setattr(runner, "on_terminal", unseen)
    monkeypatch.setattr(runner, "run_all", run_all)
    monkeypatch.setattr(runner, "checked", lambda runs: ({}, 2))
    stage = replace(SEARCH, seeds=(201, 202), grid=(1e-4, 2e-4))

    def run_stage(until=None, **changed):
        runs = stages.planned(stage, tmp_path)
        here = [run for run in runs if not stages.ended(run)]
        return runner.run_stage(replace(stage, **changed), runs, here, tmp_path, until)

    return begun, fails, run_stage


def test_a_run_that_fails_is_tried_once_more_and_then_counts_as_ended(one_by_one, monkeypatch):
    begun, fails, run_stage = one_by_one
    monkeypatch.setattr(stages, "MOST_MORE", 0)
    fails.add("plain_0.0002-group-s201")
    assert run_stage()
    assert len(begun) == 4
    run_stage()
    assert begun[4:] == ["plain_0.0002-group-s201"]
    run_stage()
    assert len(begun) == 5


def test_the_machine_is_the_reason_if_runs_fail_in_a_row(one_by_one):
    begun, fails, run_stage = one_by_one
    fails |= {f"plain_{rate}-group-s{seed}" for rate in ("0.0001", "0.0002") for seed in (201, 202)}
    with pytest.raises(RunError, match="3 runs in a row"):
        run_stage()
    assert len(begun) == 3


def test_what_a_model_solves_is_counted_after_its_run(one_by_one, monkeypatch, capsys):
    """A count that fails stops nothing. The run stays uncounted."""
    begun, fails, run_stage = one_by_one
    fails.add("plain_0.0001-group-s202")
    counted = []

    def solved_by(folder, root):
        counted.append((folder.name, begun[-1]))
        if len(counted) == 2:
            raise RunError("the evaluation ended with 1")

    monkeypatch.setattr(runner, "solved_by", solved_by)
    assert run_stage(solved=True)
    assert counted == [(name, name) for name in begun if name not in fails] and len(counted) == 3
    assert f"{counted[1][0]} is not counted: the evaluation ended with 1" in capsys.readouterr().err


def test_runs_that_are_not_counted_are_counted_first(small, tmp_path, monkeypatch):
    """Also if no run is left, and after the problems have been written."""
    monkeypatch.setattr(stages, "MOST_MORE", 0)
    search = replace(SEARCH, solved=True)
    monkeypatch.setattr(stages, "STAGES", (search,))
    order = []
    monkeypatch.setattr(runner, "write_never", lambda root: order.append("problems"))
    monkeypatch.setattr(runner, "solved_by", lambda folder, root: order.append(folder.name))
    runs = stages.planned(search, tmp_path)
    for run in runs:
        write_run(run, 0.6 if flag(run, stages.RATE) == "0.0001" else 0.3)
    (runs[0].folder / SOLVED).touch()
    assert runner.run(tmp_path, None) == 0 and small == []
    assert order == ["problems", runs[1].name]


def test_a_stage_without_a_rate_is_left_out(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "MOST_MORE", 0)
    for run in stages.planned(SEARCH, tmp_path):
        run.folder.mkdir(parents=True)
        (run.folder / stages.FAILED).touch()
    assert runner.run(tmp_path, None) == 0 and small == []
    assert (
        "stage after is left out: the search search: a run of each rate of plain has failed" in capsys.readouterr().out
    )


def test_no_run_is_started_after_the_time(one_by_one):
    begun, _, run_stage = one_by_one
    assert run_stage(until=0.0) is False and begun == []


# ── around the runs ──


def test_each_arm_is_checked_and_its_steps_are_counted(tmp_path, monkeypatch):
    """With the real checks. The data of 512 prompts are made up."""
    from types import SimpleNamespace

    from bapo_openrlhf.launch import preflight

    monkeypatch.setattr(preflight, "check_inputs", lambda args: SimpleNamespace(prompts=512, candidates=1))
    stage = stages.Stage("one", 1, "best_rates", (1,), {"plain": 1, "half": 1, "bapo": 1}, grid=(1e-4,))
    runs = stages.planned(stage, tmp_path)
    steps, devices = runner.checked(runs)
    assert steps == {"plain_0.0001-group-s1": 64, "half_0.0001-group-s1": 128, "bapo_0.0001-group-s1": 64}
    assert devices >= 2  # actor and engine
    runner.record.begin_run(runs[0].folder, {"started": "now", "config": {"data.max_len": 1}})
    with pytest.raises(ConfigError, match=r"plain_0\.0001-group-s1 .* was started with data\.max_len 1 "):
        runner.checked(runs)


def test_a_terminated_runner_leaves_its_block_in_order():
    left, before = [], signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, runner.ending_in_order():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            left.append("ended")
    assert end.value.code == 128 + signal.SIGTERM and left == ["ended"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_worktree_is_made_once(tmp_path, monkeypatch):
    """In a repository of its own, whose Makefile only notes that it was called."""
    origin, place = tmp_path / "origin", tmp_path / "place"
    origin.mkdir()
    (origin / "Makefile").write_text(".venv/.installed:\n\tmkdir -p .venv && echo made >> .venv/.installed\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", *identity, *words], cwd=origin, check=True)
    monkeypatch.setattr(runner, "ROOT", origin)
    unpacked = []
    for name in ("unpack_model", "unpack"):
        monkeypatch.setattr(runner, name, lambda place, *_: unpacked.append(place))
    for _ in range(2):
        runner.prepare(place, "HEAD")
    assert (place / ".venv" / ".installed").read_text() == "made\n" and unpacked == [place] * 4
    heads = [subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True).stdout
             for folder in (origin, place)]  # fmt: skip
    assert heads[0] == heads[1]


def test_what_is_left(small, tmp_path):
    def runs_left():
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in runner.left(tmp_path).splitlines()]
        return {row[0]: row[2] for row in rows}

    assert runs_left().items() >= {"search": "2", "after": "4", "all": "6"}.items()
    runner.run(tmp_path, None)
    assert runs_left().items() >= {"search": "0", "after": "0", "all": "0"}.items()


def test_the_design_has_the_hours_of_the_plan(tmp_path, small_search):
    """Of all runs, before any is made. They are within the budget: 20 hours with AMX, and 36 with AVX2.

    The stage `one_rate` is not in it. It is optional, and the design says that it is dropped first.
    """
    design = (runner.ROOT / "research" / "decision_design.md").read_text()
    table = runner.left(tmp_path)
    assert table in design
    hours = {cells[1].strip(): [float(cell) for cell in cells[-3:-1]]
             for cells in (line.split("|") for line in table.splitlines()[2:])}  # fmt: skip
    amx, avx2 = (whole - optional for whole, optional in zip(hours["all"], hours["one_rate"], strict=True))
    assert 15 < amx <= 20 and avx2 <= 36 and hours["one_rate"][0] <= 1.0
    assert "They go in this order: `one_rate`;" in " ".join(design.split())

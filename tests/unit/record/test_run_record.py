"""What a run leaves on disk."""

import json
import math
import os
import platform
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from watched_disk import each_crash

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record import shapes
from bapo_openrlhf.record.run_record import METRICS, append_rows, begin_run, read_metrics, read_run, summarise


def lines(directory):
    return (directory / "metrics.jsonl").read_text().splitlines()


def test_one_line_a_step_readable_while_the_run_goes_on(tmp_path):
    assert read_metrics(tmp_path) == []
    append_rows(tmp_path, METRICS, 1, [{"step": 9, "a": 0.5}])
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5}]
    append_rows(tmp_path, METRICS, 2, [{"b": 3}])
    assert lines(tmp_path) == ['{"step": 1, "a": 0.5}', '{"step": 2, "b": 3}']


def test_what_json_cannot_hold_becomes_null(tmp_path):
    nulls = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "np_nan": np.float32("nan"), "none": None}
    values = {"np_float": np.float32(0.5), "np_int": np.int64(7), "flag": True, "text": "é", "big": 10**30}
    append_rows(tmp_path, METRICS, 1, [nulls | values])
    (line,) = lines(tmp_path)
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"step": 1, **dict.fromkeys(nulls), **values}


def test_other_values_are_refused_by_name_and_leave_no_half_line(tmp_path):
    append_rows(tmp_path, METRICS, 1, [{"a": 1}])
    with pytest.raises(TypeError, match="loss"):
        append_rows(tmp_path, METRICS, 2, [{"a": 1, "loss": np.zeros(3)}])
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1}]


@pytest.mark.parametrize("cut", range(1, 20))
def test_line_cut_short_by_a_crash_is_dropped(tmp_path, cut):
    for step in (1, 2):
        append_rows(tmp_path, METRICS, step, [{"a": step}])
    path = tmp_path / "metrics.jsonl"
    assert len(lines(tmp_path)[1]) == 19
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1}]
    record.cut_rows(tmp_path, 2)
    append_rows(tmp_path, METRICS, 2, [{"a": 3}])
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1}, {"step": 2, "a": 3}]


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def test_rows_are_durable(tmp_path, monkeypatch):
    """Each file of rows, its name in the folder, and a file before it takes the place of an older one."""
    synced, places = [], []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    for name in record.BY_STEP:
        append_rows(tmp_path, name, 1, [{"uid": 0}])
    record.sync_rows(tmp_path)
    assert sorted(synced) == sorted([tmp_path, *(tmp_path / name for name in record.BY_STEP)])
    for name in record.BY_STEP[2:]:
        (tmp_path / name).unlink()
    monkeypatch.setattr(os, "replace", lambda old, new: places.append((old in synced, new.name)))
    record.cut_rows(tmp_path, 1)
    record.write_summary(tmp_path, {})
    assert places == [(True, "metrics.jsonl"), (True, "groups.jsonl"), (True, "summary.json")]


def test_lines_of_groups_and_answers_are_read_while_they_are_written(tmp_path):
    assert record.read_groups(tmp_path) == record.read_answers(tmp_path) == []
    group = {"prompt": "a", "source": "fresh", "state": "fresh", "responses": 4}
    append_rows(tmp_path, record.GROUPS, 1, [group | {"mean": None}, group | {"mean": np.float64(0.5)}])
    append_rows(tmp_path, record.ANSWERS, 1, [])
    assert not (tmp_path / "answers.jsonl").exists()
    answer = {"prompt": "a", "kind": "failed", "text": "", "response": "x\ny \u2028 \ud800"}
    append_rows(tmp_path, record.ANSWERS, 2, [answer])
    with (tmp_path / "groups.jsonl").open("a") as file:
        file.write('{"step": 2, "ui')  # not written to the end yet
    assert record.read_groups(tmp_path) == [{"step": 1, **group, "mean": mean} for mean in (None, 0.5)]
    assert record.read_answers(tmp_path) == [{"step": 2, **answer}]
    assert read_metrics(tmp_path) == []


def test_resume_drops_later_lines_of_every_file(tmp_path):
    for name in record.BY_STEP:
        for step in (1, 2, 3):
            append_rows(tmp_path, name, step, [{"n": 2 * step}, {"n": 2 * step + 1}])
    record.cut_rows(tmp_path, 3)
    for name in record.BY_STEP:
        assert [row["n"] for row in record.read_rows(tmp_path / name, shapes.ROW)] == [2, 3, 4, 5]
    record.cut_rows(tmp_path, 1)
    assert not any(record.read_rows(tmp_path / name) for name in record.BY_STEP)


START = {"name": "run", "started": "2026-01-01T00:00:00+00:00", "total_steps": None, "config": {"a.b": [1, math.inf]}}


def write_record(folder):
    begin_run(folder, START)
    for name in record.BY_STEP:
        append_rows(folder, name, 1, [{}])
    record.write_summary(folder, {"steps": 1})


def test_a_new_run_begins_with_an_empty_record(tmp_path):
    folder = tmp_path / "new" / "run"
    assert read_run(folder) == {}
    for _ in range(2):
        begin_run(folder, START)
        assert read_run(folder) == START | {"config": {"a.b": [1, None]}}
        assert [path.name for path in folder.iterdir()] == ["run.json"]
        write_record(folder)
        assert len(list(folder.iterdir())) == len(record.BY_STEP) + 2


def test_a_run_whose_deletion_is_cut_short_is_still_one(tmp_path):
    """Until all that it left beside its record is gone."""
    base, work = tmp_path / "base", tmp_path / "work"
    write_record(base)
    (base / record.MODEL).mkdir()
    (base / record.MODEL / "config.json").touch()
    (base / record.CHECKPOINTS / "_actor").mkdir(parents=True)
    (base / "train.log").touch()
    for _ in each_crash(base, work, record.remove_run):
        others = [name for name in (*record.OTHERS, record.RUN) if (work / name).exists()]
        assert record.holds_run(work) or not others


def test_a_resumed_run_keeps_its_lines_and_its_start(tmp_path):
    begin_run(tmp_path, START)
    append_rows(tmp_path, METRICS, 1, [{}])
    record.write_summary(tmp_path, {"steps": 1})
    for number in (1, 2):
        begin_run(tmp_path, START | {"started": f"later {number}", "total_steps": 10 * number}, resumes=True)
    result = read_run(tmp_path)
    assert (result["started"], result["resumed"]) == (START["started"], ["later 1", "later 2"])
    assert result["total_steps"] == 20
    assert len(read_metrics(tmp_path)) == 1 and record.read_summary(tmp_path) == {}  # it has not ended


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *((name, "{]") for name in record.BY_STEP),
        (record.WARNINGS, '{"step": 1}'),
        (record.GROUPS, '{"step": 1}'),
        (record.ANSWERS, '{"step": 1}'),  # without what the trainer reads of it
        (record.METRICS, '{"step": 1, "rollouts/total": "x"}'),
        (record.EVALUATIONS, '{"step": 1, "eval_a_pass1": "x"}'),
    ],
)
def test_a_damaged_file_ends_a_resume_before_anything_changes(tmp_path, name, line):
    begin_run(tmp_path, START)
    (tmp_path / name).write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=rf"{name}.* is damaged"):
        begin_run(tmp_path, START | {"started": "later"}, resumes=True)
    assert "resumed" not in read_run(tmp_path)


def test_a_run_of_before_there_was_a_run_json_resumes(tmp_path):
    append_rows(tmp_path, METRICS, 1, [{}])
    begin_run(tmp_path, START, resumes=True)
    assert read_run(tmp_path)["resumed"] == [START["started"]] and len(read_metrics(tmp_path)) == 1


def news_of(means, rebuilt_at=None):
    """(position, prompt, kind) of all news in groups (prompt, mean). The states are rebuilt before one group."""
    states, rows = record.PromptStates(), []
    for position, (prompt, mean) in enumerate(means):
        if position == rebuilt_at:
            states = record.PromptStates({"prompt": prompt, "kind": kind} for _, prompt, kind in rows)
        kind = states.news(prompt, mean)
        if kind:
            rows.append((position, prompt, kind))
    return rows


GROUPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([None, Fraction(-1), Fraction(0), Fraction(1, 8), Fraction(1)])),
    max_size=12,
)


@given(GROUPS, st.integers(0, 12))
@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
def test_each_prompt_fails_once_and_is_solved_once_after_that(means, rebuilt_at):
    wanted = []
    for prompt in "abc":
        of_prompt = [(position, mean) for position, (name, mean) in enumerate(means) if name == prompt]
        failed = [position for position, mean in of_prompt if mean == 0][:1]
        solved = [position for position, mean in of_prompt if mean is not None and mean > 0 and failed < [position]]
        wanted += [(position, prompt, "failed") for position in failed]
        wanted += [(position, prompt, "solved") for position in solved[:1] if failed]
    assert news_of(means) == sorted(wanted)
    assert news_of(means, rebuilt_at) == sorted(wanted)  # a resumed run goes on from what it kept


@given(st.text(max_size=40), st.integers(0, 40))
@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
def test_shortened_keeps_beginning_and_end(text, chars):
    result = record.shortened(text, chars)
    if len(text) <= chars:
        assert result == text
        return
    assert len(result) == chars
    kept = chars - len(record.GAP)
    if kept >= 0:
        start, end = result[: (kept + 1) // 2], result[chars - kept // 2 :]
        assert result == start + record.GAP + end and text.startswith(start) and text.endswith(end)


def test_summary_is_written_whole_or_not_at_all(tmp_path):
    record.write_summary(tmp_path, {"a": 1, "bad": math.nan, "groups": {"fresh": np.int64(3)}})
    assert record.read_summary(tmp_path) == {"a": 1, "bad": None, "groups": {"fresh": 3}}
    with pytest.raises(TypeError, match="object"):
        record.write_summary(tmp_path, {"a": 2, "b": object()})
    assert record.read_summary(tmp_path)["a"] == 1
    record.write_summary(tmp_path, {"a": 3})
    assert record.read_summary(tmp_path) == {"a": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert record.read_summary(tmp_path / "none") == {}


def test_summarise_by_hand():
    rows = [
        {"step": step, "reward/fresh_mean": reward, "groups/fresh": 3, "groups/reevaluated": step % 2,
         "groups/replayed": 2 * step, "groups/filtered": 99, "rollouts/total": 10 * step, "timing/generation": 0.5,
         **({"timing/reevaluation": 0.25} if step % 2 else {})}
        for step, reward in enumerate([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8], start=1)
    ]  # fmt: skip
    assert summarise(rows) == {
        "steps": 7,
        "reward_start": pytest.approx((0.1 + 0.2) / 2),  # a third of 7 steps
        "reward_end": pytest.approx((0.6 + 0.8) / 2),
        "groups": {"fresh": 21, "reevaluated": 4, "replayed": 56},
        "rollouts": 70,
        "seconds": {"generation": pytest.approx(3.5), "reevaluation": pytest.approx(1.0)},
    }
    assert list(summarise(rows)["seconds"]) == ["generation", "reevaluation"]


def test_steps_without_a_reward_are_not_counted():
    summary = summarise([{"step": step, "reward/fresh_mean": step or None} for step in (0, 0, 0, 1, 2, 4, 5)])
    assert (summary["reward_start"], summary["reward_end"]) == (1, 5)  # a third of 4 rewards is 1
    assert record.end_means([math.nan, 1.0, 2.0, math.nan]) == (1, 2, 1)
    assert record.end_means(range(30)) == (3.5, 25.5, 8)
    assert np.isnan(record.end_means([])[:2]).all()


def evaluations_of(*scores_by_name):
    return [
        {"step": 5 * number, "eval_num_samples": 8} | {f"eval_{name}_pass1": score for name, score in scores.items()}
        for number, scores in enumerate(scores_by_name, 1)
    ]


@pytest.mark.parametrize(("evaluations", "words"), [
    ([], ""),
    ([{}, {"a": None}], ""),
    ([{"a": 0.25, "b": 0.5}], "a 0.250, b 0.500 (step 5)"),
    ([{}, {"a": 0.25}, {"a": 0.5}, {"a": 1}, {}], "a 0.250 to 1.000 (steps 10 to 20)"),
    # The data was changed on a resume.
    ([{"a": 0.25}, {"b": 0.5}], "b 0.500 (step 10)"),
    ([{"a": 0.25}, {"b": 0.5}, {"b": 0.75}], "b 0.500 to 0.750 (steps 10 to 15)"),
    ([{"a": 0.25}, {"a": 0.5, "b": 0.5}], "a 0.250 to 0.500, b 0.500 (steps 5 to 10)"),
])  # fmt: skip
def test_the_change_of_held_out_scores(evaluations, words):
    assert record.change_in_words(evaluations_of(*evaluations)) == words


def test_summarise_without_numbers():
    empty = {"reward_start": None, "reward_end": None, "rollouts": 0, "seconds": {}}
    groups = {"groups": {"fresh": 0, "reevaluated": 0, "replayed": 0}}
    assert summarise([]) == {"steps": 0, **empty, **groups}
    assert summarise([{"step": 1, "reward/fresh_mean": None}]) == {"steps": 1, **empty, **groups}


def git(directory, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_commit_is_the_packages_own(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "run_record.py").write_text("")
    monkeypatch.setattr(record, "__file__", str(package / "run_record.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.provenance()["commit"] is None
    git(tmp_path, "init")
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-m", "another project's")
    assert record.provenance()["commit"] is None
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "with the package")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40 and record.provenance()["commit"] == head
    (tmp_path / "other").write_text("changed")
    assert record.provenance()["commit"] == f"{head}-dirty"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: Xeon: 4th\nflags\t\t: fpu avx2 avx512f amx_bf16 avx512_bf16\n\nmodel name\t: other\n",
         "Xeon: 4th, amx_bf16"),
        ("model name\t: old\nflags\t\t: fpu\n", "old"),
        ("processor\t: 0\nCPU part\t: 0xd40\n", platform.machine()),
    ],
)  # fmt: skip
def test_the_kind_of_cpu(tmp_path, text, expected):
    (tmp_path / "cpuinfo").write_text(text)
    assert record.cpu_kind(tmp_path / "cpuinfo") == expected
    assert record.cpu_kind(tmp_path / "none") == (platform.processor() or None)


def test_provenance_without_git_and_with_versions(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(record.sys, "orig_argv", ["python", "-m", "bapo_openrlhf.cli", "train", "--run.name", "a b"])
    result = record.provenance()
    assert result["commit"] is None and result["cpu"] == record.cpu_kind()
    assert result["command"] == "python -m bapo_openrlhf.cli train --run.name 'a b'"
    assert result["versions"]["numpy"] == np.__version__
    assert result["versions"]["python"].startswith("3.")


@pytest.mark.parametrize("words", [["--logger.wandb.key", "s3cret", "x"], ["--logger.wandb.key=s3cret", "x"]])
def test_a_secret_is_not_written_down(monkeypatch, words):
    monkeypatch.setattr(record.sys, "orig_argv", ["python", *words])
    command = record.provenance(secret="s3cret")["command"]
    assert "s3cret" not in command and "***" in command and command.endswith(" x")
    assert "s3cret" in record.provenance()["command"] and "s3cret" in record.provenance(secret="")["command"]


def test_a_lock_outlives_the_run_that_is_removed(tmp_path):
    """The new run owns the folders already, and with another file there it would not be their only owner."""
    for place in ("run.json", "checkpoints/_actor/latest", "model/config.json", ".lock", "checkpoints/.lock"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("{}")
    record.remove_run(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {".lock", "checkpoints", "checkpoints/.lock"}

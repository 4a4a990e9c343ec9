"""Comparisons of two evaluations that are written by hand."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from bapo_openrlhf.cli import compare as cli
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.evaluation import store
from bapo_openrlhf.workbench.evaluation.compare import compare, table

# By problem: how many of A's 4 and of B's 8 responses are solved. Half of them is enough for "solved".
RIGHT = {"q1": (4, 8), "q2": (2, 3), "q9": (1, 4), "q10": (0, 1), "q11": (1, 0), "q12": (0, 0), "q20": (0, 8)}
DIFFERENCES = {"q1": 0, "q2": -12.5, "q9": 25, "q10": 12.5, "q11": -25, "q12": 0, "q20": 100}


@dataclass
class Written:
    """An evaluation's folder. `right` holds the number of solved responses by benchmark and problem."""

    folder: Path
    runs: int
    right: dict
    name: str = "run"
    sampling: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)  # other than 0 and 1
    reward_range: tuple | None = None
    reward: tuple = ()  # file and digest
    chat_template: bool = True

    def write(self):
        sampling = {"runs": self.runs, "temperature": 1.0, "seed": 42} | self.sampling
        settings = {"name": self.name, "model": {}, "sampling": sampling, "chat_template": self.chat_template,
                    "limit": None}  # fmt: skip
        entry = {} if self.reward_range is None else {"reward_range": self.reward_range}
        entry |= dict(zip(("reward", "reward_sha256"), self.reward, strict=False))
        store.write_settings(self.folder, settings | {"benchmarks": {key: entry for key in self.right}})
        for benchmark, counts in self.right.items():
            for identity, count in counts.items():
                scores = self.scores.get(identity, [1.0] * count + [0.0] * (self.runs - count))
                row = {"id": identity, "input": f"about {identity}", "label": "7", "prompt": "x", "scores": scores}
                store.append_row(self.folder, benchmark, row)
        return self.folder


@pytest.fixture
def two(tmp_path):
    """A and B have the counts of RIGHT; B has them in another order. Each has own problems, and A a benchmark."""
    counts_a = {identity: a for identity, (a, _) in RIGHT.items()} | {"only a": 4}
    counts_b = {identity: b for identity, (_, b) in reversed(RIGHT.items())} | {"only b": 8, "only b, too": 8}
    return (
        Written(tmp_path / "a", 4, {"own": counts_a, "aime24": {"x": 1}}, "before"),
        Written(tmp_path / "b", 8, {"own": counts_b}, "after"),
    )


def compared(two, tmp_path):
    a, b = two
    return compare(a.write(), b.write(), tmp_path / "out")


def test_each_side_has_the_range_of_its_own_rewards(two, tmp_path):
    unit = compared(two, tmp_path)["benchmarks"]["own"]
    a, b = two
    wide = {identity: [100.0] * right + [0.0] * (8 - right) for identity, right in b.right["own"].items()}
    b = replace(b, folder=tmp_path / "wide", reward_range=["0", "100"], scores=wide)
    assert compare(a.folder, b.write(), tmp_path / "out")["benchmarks"]["own"] == unit


def test_differences_are_b_minus_a_over_the_shared_problems(two, tmp_path):
    result = compared(two, tmp_path)
    assert list(result["benchmarks"]) == ["own"]
    entry = result["benchmarks"]["own"]
    assert (entry["problems"], entry["only_in_a"], entry["only_in_b"]) == (7, 1, 2)
    assert (entry["gained"], entry["lost"]) == (["q9", "q20"], ["q2"])
    assert entry["differences"] == pytest.approx(DIFFERENCES) and list(entry["differences"]) == list(DIFFERENCES)
    assert entry["avg"]["a"] == pytest.approx(100 * 8 / 28) and entry["avg"]["b"] == pytest.approx(100 * 24 / 56)
    assert entry["avg"]["difference"]["value"] == pytest.approx(100 / 7)
    # pass@4: A's is whether any is solved, B's 1 - C(8 - c, 4) / 70
    assert entry["k"] == 4
    assert entry["pass"]["a"] == pytest.approx(100 * 4 / 7)
    assert entry["pass"]["b"] == pytest.approx(100 * (1 + (1 - 5 / 70) + (1 - 1 / 70) + 1 / 2 + 0 + 0 + 1) / 7)
    assert entry["pass"]["difference"]["value"] == pytest.approx(entry["pass"]["b"] - entry["pass"]["a"])


def test_the_interval_is_the_bootstraps_of_paired_differences(tmp_path):
    """Half of 64 problems gain 50 points, so the standard error is 25 / 8 points, however the problems differ."""
    a = Written(tmp_path / "a", 8, {"own": {f"q{i}": i // 16 for i in range(64)}}, "a").write()
    b = Written(tmp_path / "b", 8, {"own": {f"q{i}": i // 16 + 4 * (i % 2) for i in range(64)}}, "b").write()
    difference, half = compare(a, b, tmp_path / "out")["benchmarks"]["own"]["avg"]["difference"], 1.96 * 25 / 8
    assert difference["value"] == pytest.approx(25)
    assert (difference["low"], difference["high"]) == pytest.approx((25 - half, 25 + half), abs=0.8)


def test_scores_need_not_be_zero_or_one(two, tmp_path):
    two[0].scores = {"q1": [0.5, 0.5, 1.0, 0.25]}
    entry = compared(two, tmp_path)["benchmarks"]["own"]
    assert entry["differences"]["q1"] == pytest.approx(100 * (1 - 2.25 / 4))
    assert entry["gained"] == ["q1", "q9", "q20"]  # A got full marks once in four


def test_the_files_say_the_same(two, tmp_path):
    result = compared(two, tmp_path)
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == result
    assert {"command", "commit", "versions"} <= set(result)
    (row,) = table(result).rows
    assert row[:4] == ["own", "7", "28.57", "42.86"] and row[4].startswith("+14.29 [") and row[-1] == "+2 / -1"
    parts = (table(result).markdown(), "gained: q9, q20", "lost: q2", "own: 1 problems only in A and 2 only in B")
    assert all(part in (tmp_path / "out" / "compare.md").read_text() for part in parts)


def test_a_tasks_benchmark_has_the_title_that_evaluate_shows(tmp_path):
    a, b = (Written(tmp_path / name, 4, {"gsm8k": {"q1": 2}}, name).write() for name in "ab")
    assert compare(a, b, tmp_path / "out")["benchmarks"]["gsm8k"]["title"] == "GSM8K"


@pytest.mark.parametrize("failures", [[None] * 5, [None, None, None, 1], None])
def test_a_row_with_damaged_failures_is_refused(two, tmp_path, failures):
    a, b = (side.write() for side in two)
    store.append_row(a, "own", store.read_rows(a, "own")["q10"] | {"failures": failures})
    with pytest.raises(ConfigError, match=r"own\.jsonl, line 9, is damaged"):
        compare(a, b, tmp_path / "out")


@pytest.mark.parametrize("what", ["input", "label"])
def test_other_problems_under_the_same_ids_are_refused(two, tmp_path, what):
    a, b = (side.write() for side in two)
    store.append_row(b, "own", store.read_rows(b, "own")["q10"] | {what: "changed"})  # a later row counts
    with pytest.raises(ConfigError, match=f"benchmark own, problem q10: the {what} is .* and 'changed' in the other"):
        compare(a, b, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_in_common_is_refused(two, tmp_path):
    a, b = two
    b.right = {"other": {"q1": 8}}
    with pytest.raises(ConfigError, match=r"no benchmark in common: .*a has own, aime24; .*b has other"):
        compared(two, tmp_path)
    Written(tmp_path / "c", 8, {"own": {"else": 8}}, "c").write()
    with pytest.raises(ConfigError, match=r"benchmark own: .* no problem in common"):
        compare(a.folder, tmp_path / "c", tmp_path / "out")


def test_folders_that_are_no_evaluation_are_refused(two, tmp_path):
    a, _ = (side.write() for side in two)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "settings.json").write_text('{"name": 99}')
    for words, says in (
        ([str(tmp_path / "nowhere")], r"nowhere has no settings\.json"),
        ([str(tmp_path / "damaged")], r"settings\.json is damaged"),
        ([], "RUN_B"),
    ):
        with pytest.raises(ConfigError, match=says):
            cli.main([str(a), *words])


def test_another_way_of_asking_is_said(two, tmp_path):
    two[1].sampling, two[1].chat_template = {"temperature": 0.6, "seed": 1}, False
    two[0].reward, two[1].reward = ("own.py", "0123456789"), ("own.py", "abcdefghij")
    two[1].reward_range = ["-1", "1"]
    said = compared(two, tmp_path)["different_settings"]
    assert {*said} == {
        "runs: 4 and 8", "temperature: 1.0 and 0.6", "chat_template: True and False",
        "own, content of the reward file: 01234567 and abcdefgh", "own, reward range: 0 1 and -1 1",
    }  # fmt: skip
    assert "temperature: 1.0 and 0.6" in (tmp_path / "out" / "compare.md").read_text()


def test_runs_of_one_name_are_told_apart(two, tmp_path):
    two[1].name = "before"
    result = compared(two, tmp_path)
    assert [result[side]["name"] for side in "ab"] == [f"before ({tmp_path / side})" for side in "ab"]


def test_the_command_prints_the_table(two, tmp_path, capsys, monkeypatch):
    a, b = (side.write() for side in two)
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(a), str(b)]) == 0 and "+14.29" in capsys.readouterr().out
    assert (tmp_path / "runs" / "compare" / "a_b" / "compare.md").is_file()


def test_draws_of_a_comparison_do_not_depend_on_the_order_of_lines(two, tmp_path):
    first = compared(two, tmp_path)["benchmarks"]
    path = tmp_path / "a" / "own.jsonl"
    path.write_text("".join(np.random.default_rng(0).permutation(path.read_text().splitlines(keepends=True))))
    assert compare(tmp_path / "a", tmp_path / "b", tmp_path / "out")["benchmarks"] == first

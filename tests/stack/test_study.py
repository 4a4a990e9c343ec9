"""A study on the real stack: two methods, one seed, a few steps, two runs at a time in one Ray.

One run is plain GRPO. The other has a method that chooses its prompts among candidates.
"""

import subprocess
import sys

import pandas
import pytest
import yaml

from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import read_evaluations, read_groups, read_metrics, read_run, read_summary

pytestmark = pytest.mark.stack


COMMAND = [sys.executable, "-m", "bapo_openrlhf.cli", "study", "--config", "pair.yaml", "--smoke"]
RUNS = {"plain-group-s7": "grpo", "mopps-critic-s7": "ba_ppo"}


@pytest.fixture(scope="module")
def study(workspace, small_flags):
    """The folder of a study that has run."""
    short = {"eval.steps": 2, "eval.n_samples_per_prompt": 2}
    content = {
        "name": "pair",
        "flags": small_flags
        | {
            "actor.model_name_or_path": "model",
            "critic.model_name_or_path": "model",
            "data.prompt_dataset": "data.jsonl",
            "eval.dataset": "data.jsonl",
            "ckpt.best_metric_key": "none",
        },
        "seeds": [7, 8],
        "parallel": 2,
        "methods": {
            "plain": {"arms": {"group": "GRPO"}, "flags": {"adapt.method": "none", "data.max_samples": 16}},
            "bapo": {"arms": {"group": "BAPO-GRPO"}},
            "mopps": {
                "arms": {"critic": "MoPPS"},
                "flags": {"adapt.method": "mopps", "adapt.options": ["candidates=3"]},
            },
        },
        "smoke": {"methods": ["plain", "mopps"], "flags": short},
    }
    (workspace / "pair.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run(COMMAND, cwd=workspace, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return workspace / "runs" / "studies" / "pair_smoke"


@pytest.mark.parametrize("name", RUNS)
def test_each_run_leaves_a_whole_record(study, name):
    folder = study / "runs" / name
    about = read_run(folder)
    assert (about["name"], about["algorithm"], about["seed"]) == (name, RUNS[name], 7)
    assert read_summary(folder)["steps"] == 2
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2]
    names = {name for row in rows for name in row} - {"step", "length"}  # "length" is what reward.py reports
    assert names <= metrics.names(RUNS[name], optional=True)
    assert ("critic_loss" in names) is (RUNS[name] == "ba_ppo")
    (evaluation,) = read_evaluations(folder)
    (accuracy,) = (value for name, value in evaluation.items() if name.endswith("_pass1"))
    assert evaluation["step"] == 2 and 0 <= accuracy <= 1


def test_grpo_has_all_its_numbers(study):
    rows = read_metrics(study / "runs" / "plain-group-s7")
    assert [row["groups/fresh"] for row in rows] == [8, 8]
    missing = metrics.names("grpo", optional=False) - {name for row in rows for name in row}
    assert all("reevaluated" in name or "replayed" in name for name in missing)


def test_prompts_are_chosen_among_candidates(study):
    """8 of 24 at each step, and none twice."""
    folder = study / "runs" / "mopps-critic-s7"
    assert [row["prompts/passed_over"] for row in read_metrics(folder)] == [16, 16]
    groups = read_groups(folder)
    assert len(groups) == len({group["prompt"] for group in groups}) == 16


def test_they_went_on_at_the_same_time(study):
    spans = []
    for name in RUNS:
        folder = study / "runs" / name
        spans.append((read_run(folder)["started"], read_summary(folder)["finished"]))
    assert max(start for start, _ in spans) < min(end for _, end in spans)


def test_one_table_has_all_steps(study):
    table = pandas.read_parquet(study / "table.parquet")
    rows = sorted(zip(table["label"], table["step"], strict=True))
    assert rows == [("GRPO", 1), ("GRPO", 2), ("MoPPS", 1), ("MoPPS", 2)]
    assert table["done"].all()
    assert len(pandas.read_csv(study / "table.csv")) == 4


def test_the_page_shows_both(study):
    page = (study / "report.html").read_text()
    assert "MoPPS" in page and "GRPO" in page and "2 of 2 runs are there" in page
    summary = " ".join((study / "summary.md").read_text().split())  # the cells are padded
    assert "| GRPO | group | 1 of 1 |" in summary and "| MoPPS | critic | 1 of 1 |" in summary


def test_what_is_done_is_not_run_again(study, workspace):
    before = {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*")}
    done = subprocess.run(COMMAND, cwd=workspace, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*")} == before

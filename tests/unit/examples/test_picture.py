"""The picture and the table of one run."""

import runpy
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.run_record import ANSWERS, METRICS, append_rows, summarise
from bapo_openrlhf.workbench.pages.colours import SOURCE_LABELS
from bapo_openrlhf.workbench.report.figures import Comparison, composition, reward
from bapo_openrlhf.workbench.report.runs import Run

plot = user_file.load("picture", Path(__file__).parents[3] / "examples" / "quickstart" / "picture.py")
PAPERS = ("fresh", "reevaluated", "replayed")  # sources that every run shows


@pytest.fixture
def rows():
    return [
        {"step": step, "reward/fresh_mean": 0.3 + 0.02 * step, "groups/fresh": 5, "groups/replayed": step,
         "groups/reevaluated": 2 if step % 4 == 0 else 0, "groups/capacity": 16}
        for step in range(1, 13)
    ]  # fmt: skip


def test_columns_stack_each_steps_sources(rows):
    chart = composition(Comparison([Run("run", rows)]))[0].chart
    bars = chart.layer[0].data.iloc[::2]
    fourth = bars[bars["x"] == 3.5]
    assert fourth[["y", "y2"]].to_numpy().tolist() == [[0, 5], [5, 7], [7, 11]]
    capacity = chart.layer[1].data
    assert (capacity["x"].min(), capacity["x"].max()) == (0.5, 12.5) and set(capacity["y"]) == {16}


def test_reward_is_drawn_raw_and_smoothed(rows):
    rows[3]["reward/fresh_mean"] = None
    data = reward(Comparison([Run("run", rows)])).chart.data
    raw, smoothed = data[data["faint"]], data[~data["faint"]]
    known = [[row["step"], row["reward/fresh_mean"]] for row in rows if row["reward/fresh_mean"] is not None]
    assert raw[["x", "y"]].to_numpy().tolist() == known
    assert smoothed["y"].iloc[5] == pytest.approx(np.mean(raw["y"].iloc[4:7]))


def test_title_and_legend(rows):
    chart = plot.picture(Run("night run", rows, {"algorithm": "ba_ppo", "seed": 0}))
    assert chart.title.text == "night run · ba_ppo · seed 0"
    assert plot.picture(Run("night run", rows)).title.text == "night run"
    legend, _ = chart.vconcat[1].vconcat
    names = {layer.data["name"].item() for layer in legend.layer}
    assert names == {*(SOURCE_LABELS[source] for source in PAPERS), "batch capacity"}


def test_plot_run_of_one_step_and_of_none(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        plot.plot_run(tmp_path)
    append_rows(tmp_path, METRICS, 1, [{}])
    assert plot.plot_run(tmp_path).exists()


def text_of(table):
    console = Console(file=StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_table_shows_the_summary():
    summary = {
        "algorithm": "ba_ppo", "seed": 3, "steps": 48, "reward_start": 0.25, "reward_end": 0.5, "rollouts": 12288,
        "groups": {"fresh": 60, "reevaluated": 15, "replayed": 25}, "seconds": {"ppo_train": 1234.5},
    }  # fmt: skip
    text = text_of(plot.summary_table(summary))
    for part in ("ba_ppo", "seed 3", "0.250", "0.500", "+0.250", "12,288", "20 min 34 s", "ppo train"):
        assert part in text, part
    for source, share in zip(PAPERS, ("60%", "15%", "25%"), strict=True):
        assert share in next(line for line in text.splitlines() if SOURCE_LABELS[source] in line)
    assert "nan" not in text_of(plot.summary_table(summarise([]))).lower()


def test_the_command_draws_a_run_or_says_what_is_wrong(tmp_path, rows, monkeypatch, capsys):
    def draw(*words):
        monkeypatch.setattr(sys, "argv", [plot.__file__, *words])
        try:
            runpy.run_path(plot.__file__, run_name="__main__")
        except SystemExit as end:
            return end.code
        return None

    assert draw(str(tmp_path / "none")).startswith(f"error: run {str(tmp_path / 'none')!r} is no folder")
    assert draw() == "usage: python examples/quickstart/picture.py RUN [PICTURE]" and capsys.readouterr().out == ""
    (tmp_path / "first").mkdir()
    append_rows(tmp_path / "first", METRICS, 1, rows[:1])
    assert draw(str(tmp_path / "first")) is None
    assert capsys.readouterr().out.strip() == str(tmp_path / "first" / "run.png")
    assert (tmp_path / "first" / "run.png").stat().st_size > 0
    assert draw(str(tmp_path / "first"), str(tmp_path / "x.svg")) is None
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_the_base_models_accuracy_begins_the_curve(rows):
    evaluations = [{"step": step, "eval_sums_pass1": 0.5 + step / 100} for step in (4, 8)]
    run = plot.with_beginning(Run("run", rows, evaluations=evaluations), 0.25)
    data = plot.held_out(Comparison([run]))[0].chart.data
    assert list(data["x"]) == [0, 4, 8] and list(data["y"]) == [0.25, 0.54, 0.58]
    assert plot.with_beginning(Run("run", rows), 0.25).evaluations == ()


def test_answers_before_and_after_are_of_one_prompt(tmp_path):
    append_rows(tmp_path, METRICS, 1, [{}])
    assert plot.answers_table(tmp_path) is None
    row = {"text": "2+9:", "label": "11", "reward": 0.0}
    other = row | {"prompt": "b", "kind": "solved", "response": "2+9=other"}
    first, again = ({"prompt": "a", "kind": "failed", "response": f"2+9={n}"} | row for n in (10, 12))
    later = row | {"prompt": "a", "kind": "solved", "response": "2+9=11", "reward": 1.0}
    for step, one in enumerate((first, again, later, other), start=1):
        append_rows(tmp_path, ANSWERS, step, [one])
    text = text_of(plot.answers_table(tmp_path))
    assert "2+9=10" in text and "2+9=11" in text and "2+9=12" not in text and "other" not in text

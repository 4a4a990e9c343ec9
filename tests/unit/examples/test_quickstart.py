"""The files that `python examples/quickstart` makes before it trains."""

import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from bapo_openrlhf.tasks import countdown

PROJECT = Path(__file__).parents[3]
QUICKSTART = PROJECT / "examples" / "quickstart"
main = runpy.run_path(str(QUICKSTART))["main"]
SIZES = main.__globals__["SIZES"]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Run --only-prepare in an empty folder without making a base model. Returns the rows of the training data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(main.__globals__, "build", lambda folder, settings=None: (folder, False))

    def run(*flags):
        size = flags[flags.index("--size") + 1] if "--size" in flags else "sums"
        config = yaml.safe_load((PROJECT / SIZES[size].files[-1]).read_text())
        monkeypatch.setattr(sys, "argv", ["quickstart", "--only-prepare", *flags])
        assert main() == 0
        rows = (tmp_path / config["data"]["prompt_dataset"]).read_text().splitlines()
        return [json.loads(row) for row in rows], config

    return run


def test_data_is_what_the_preset_trains_on(prepare):
    rows, config = prepare("--size", "countdown", "--prompts", "40")
    puzzles = countdown.make_puzzles("small", "train", 40, 0)
    prompts, labels = ([row[config["data"][f"{name}_key"]] for row in rows] for name in ("input", "label"))
    assert prompts == [f"{puzzle.problem.text}=" for puzzle in puzzles]
    assert all(len(prompt) + config["rollout"]["max_new_tokens"] <= config["data"]["max_len"] for prompt in prompts)
    assert PROJECT / config["reward"]["remote_url"] == countdown.TASK.file
    queries = [prompt + puzzle.solution + "<eos>" for prompt, puzzle in zip(prompts, puzzles, strict=True)]
    assert list(countdown.reward_func(queries, prompts, labels)["rewards"]) == [1.0] * 40


def test_the_longest_sum_and_its_answer_fit(prepare):
    """The answer has a token for each character, and one for its end."""
    rows, config = prepare()
    sums = runpy.run_path(str(QUICKSTART / "sums.py"))
    worst = sums["Sum"](9, [("-", 9)] + [("-", 9)] * (max(sums["TERMS"].values()) - 2))
    assert len(worst.worked(worst.results())) < config["rollout"]["max_new_tokens"]
    assert len(worst.prompt) + config["rollout"]["max_new_tokens"] <= config["data"]["max_len"]
    assert max(len(row["input"]) for row in rows) <= len(worst.prompt)


def test_another_number_of_prompts_is_made_anew(prepare):
    assert [len(prepare(*words)[0]) for words in (("--prompts", "30"), ("--prompts", "20"), ())] == [30, 20, 768]


def test_larger_size_has_sums_of_each_level(prepare, tmp_path):
    pytest.importorskip("reasoning_gym")
    rows, _ = prepare("--size", "steps", "--prompts", "40")
    assert {row["input"].count("+") + row["input"].count("-") for row in rows} == {4, 5, 6}
    levels = yaml.safe_load((PROJECT / "configs" / "steps" / "sums.yaml").read_text())
    assert all((tmp_path / "runs" / "reasoning_gym" / f"{level}.jsonl").is_file() for level in levels)


@pytest.mark.parametrize("number", ["0", "2501"])
def test_numbers_of_prompts_that_cannot_be_made_are_refused(prepare, number, capsys):
    with pytest.raises(SystemExit):
        prepare("--prompts", number)
    assert f"--prompts is {number}; it must be 1 to 2500" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "folder", "words"), [
    ([], "quickstart", ["--run.overwrite"]),  # its own folder
    (["--run.name", "seed1", "--train.seed", "1"], "seed1", ["--run.name", "seed1", "--train.seed", "1"]),
    (["--run.name=seed1"], "seed1", ["--run.name", "seed1"]),
])  # fmt: skip
def test_only_its_own_run_is_replaced(flags, folder, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    calls, drawn = [], []
    stand_in = SimpleNamespace(summary_table=lambda summary: "", answers_table=lambda run: None)
    stand_in.plot_run = lambda run, before: drawn.append((run, before))
    monkeypatch.setitem(sys.modules, "picture", stand_in)
    monkeypatch.setitem(main.__globals__, "made", lambda size, prompts: (Path("model"), False))
    monkeypatch.setitem(main.__globals__, "held_out", lambda model: 0.25)
    monkeypatch.setitem(main.__globals__, "stoppable", lambda call: calls.append(call) or 0)
    monkeypatch.setattr(sys, "argv", ["quickstart", *flags])
    assert main() == 0
    assert [call[6:] for call in calls] == [words] and calls[0][3:6] == ["train", "--config", "configs/quickstart.yaml"]
    assert drawn == [(Path("runs") / folder, 0.25)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_training_decides_how_a_signal_ends_it(tmp_path, number):
    """The quickstart waits for it, says nothing, and has its status."""
    child = "import signal, sys, time; signal.signal({}, lambda *_: (time.sleep(0.5), print('saved'), sys.exit(7)))"
    child = f"{child.format(int(number))}; print('begun', flush=True); time.sleep(60)"
    run = f"runpy.run_path({str(QUICKSTART)!r})['stoppable']([sys.executable, '-c', {child!r}])"
    parent = f"import runpy, sys; sys.exit({run})"
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "saved\n" and process.returncode == 7

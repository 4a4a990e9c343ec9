"""Every command that writes a run's folder owns it before anything else happens, and is refused if a run goes on there.

The owner is this process, or the stand-in of a run in another one.
"""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_openrlhf.cli import main as cli
from bapo_openrlhf.cli import study
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch import preflight, resume, start
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.training.wire.signals import NUMBERS
from bapo_openrlhf.workbench.study.runner import Outcome

FLAGS = [
    "--algorithm=bapo_grpo", "--actor.model_name_or_path=model", "--reward.remote_url=reward.py",
    "--rollout.batch_size=4", "--rollout.n_samples_per_prompt=4", "--train.batch_size=8", "--vllm.num_engines=1",
]  # fmt: skip
# A run whose training waits for the end of its input.
RUN = """
import sys
from bapo_openrlhf.cli import main
from bapo_openrlhf.launch import preflight, start
preflight.check_inputs = lambda args: preflight.Checked()
preflight.check_hub_models = lambda args: None
start.launch = lambda args, checked, *_: print("training", flush=True) or sys.stdin.read()
sys.exit(main.run(sys.argv[1:]))
"""


def mine(folder: Path):
    return owned(folder, field="x is y", what="run", instead="wait")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(command, *words): the status and the error of a command whose work is never begun."""
    for module, name in ((preflight, "check_inputs"), (start, "launch"), (study, "_check")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it began its work"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text("name: s\nseeds: [1]\nmethods: {bapo: {arms: {group: BAPO}}}\n")

    def command(*words: str) -> tuple[int, str]:
        return cli.run(words), capsys.readouterr().err

    return command


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_one_folder_for_both(tmp_path):
    (tmp_path / "link").symlink_to("runs")
    args = SimpleNamespace(
        run=SimpleNamespace(dir=str(tmp_path / "runs"), name="a"), ckpt=SimpleNamespace(path=str(tmp_path / "link/a"))
    )
    with resume.own_folders(args), pytest.raises(ConfigError, match="going on"), mine(tmp_path / "runs/a"):
        pass
    with mine(tmp_path / "runs/a"):
        pass


TRAIN = ("train", *FLAGS, "--run.name=mine")
STUDY = ("study", "--config", "study.yaml", "--output", "out")


@pytest.mark.parametrize(("words", "place", "flag", "what"), [
    (TRAIN, "runs/mine", "run.name is mine", "run"),
    ((*TRAIN, "--run.overwrite"), "runs/mine", "run.name is mine", "run"),
    ((*TRAIN, "--ckpt.load_enable"), "runs/mine/checkpoints", "ckpt.path is runs/mine/checkpoints", "run"),
    (("smoke", *TRAIN[1:]), "runs/smoke/mine", "run.name is mine", "smoke run"),
    (STUDY, "out", "--output is out", "study"),
])  # fmt: skip
def test_a_second_run_changes_nothing(run, tmp_path, words, place, flag, what):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "config.yaml").write_text("mine")
    with mine(tmp_path / place):
        before = tree(tmp_path)
        status, error = run(*words)
        assert tree(tmp_path) == before
    assert status == 2 and error.count("\n") == 1 and error.startswith(f"error: {flag}, and ")
    assert f"{place} already has a {what} that is going on: process " in error


def test_a_study_none_of_whose_runs_makes_a_step(run, monkeypatch):
    monkeypatch.setattr(study, "_check", lambda _: ({}, 1))
    monkeypatch.setattr(study, "_run", lambda *_: Outcome(failed=["bapo-group-s1"]))
    status, error = run(*STUDY)
    assert status == 1 and error.startswith("error: 1 runs failed: bapo-group-s1; the output of each is in out/runs")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_study_that_gets_a_signal(run, monkeypatch, number):
    monkeypatch.setattr(study, "_check", lambda _: ({}, 1))
    monkeypatch.setattr(study, "_run", lambda *_: signal.raise_signal(number))
    status, error = run(*STUDY)
    assert status == 128 + number and error.startswith(f"stopped by {number.name} within the study, ")
    assert error.count("\n") == 1


def training(folder):
    """RUN in a process of its own, which has begun to train."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", RUN, *TRAIN], cwd=folder, **pipes)
    assert process.stdout.readline() == b"training\n"
    return process


def test_two_runs_of_one_name(tmp_path):
    """The first goes on, and is replaced as soon as it has been killed."""
    first, folder = training(tmp_path), tmp_path / "runs/mine"
    record.append_rows(folder, record.METRICS, 1, [{"rollouts/total": 16}])
    words = [sys.executable, "-X", "importtime", "-m", "bapo_openrlhf.cli", *TRAIN, "--run.overwrite"]
    second = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    *imported, error = second.stderr.splitlines()
    assert second.returncode == 2 and second.stdout == "" and f"going on: process {first.pid} on " in error
    assert not {"ray", "torch", "vllm", "deepspeed"} & {line.rpartition("|")[2].strip() for line in imported}
    assert [row["step"] for row in record.read_metrics(folder)] == [1]
    first.kill()
    first.communicate()
    again = training(tmp_path)
    again.communicate()
    assert again.returncode == 0


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_the_first_step_ends_the_run_with_one_line(tmp_path, number):
    process = training(tmp_path)
    process.send_signal(number)
    assert process.communicate()[1].decode() == f"stopped by {number.name} before the first step\n"
    assert process.returncode == 128 + number and tree(tmp_path) == {}


def test_the_folders_are_free_after_the_run(run, tmp_path, monkeypatch):
    def launch(args, checked, signals, command):
        assert command == ["bapo-openrlhf", *TRAIN]
        with pytest.raises(ConfigError, match="going on"), resume.own_folders(args):
            pass
        (tmp_path / "runs/mine/run.json").write_text("{}")
        raise ConfigError("bad")

    monkeypatch.setattr(preflight, "check_inputs", lambda args: SimpleNamespace(warnings=()))
    monkeypatch.setattr(preflight, "check_hub_models", lambda args: None)
    monkeypatch.setattr(start, "launch", launch)
    before = tree(tmp_path)
    assert run(*TRAIN) == (2, "error: bad\n")
    assert tree(tmp_path) == before | {"runs/mine/run.json": "{}"} and not (tmp_path / "runs/mine/checkpoints").exists()

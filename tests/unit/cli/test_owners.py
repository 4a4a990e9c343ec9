"""Every command that writes a run's folder owns it before anything else happens, and is refused if a run goes on there.

The owner is this process, or the stand-in of a run in another one.
"""

from __future__ import annotations

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
preflight.check_inputs = lambda args: preflight.Checked(None)
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

    def command(*words: str) -> tuple[int, str]:
        return cli.run(words), capsys.readouterr().err

    return command


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("more", [[], ["--run.overwrite"], ["--ckpt.load_enable"]])
@pytest.mark.parametrize(
    ("place", "flag"),
    [("runs/mine", "run.name is mine"), ("runs/mine/checkpoints", "ckpt.path is runs/mine/checkpoints")],
)
def test_train(run, tmp_path, more, place, flag):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / "runs/mine/metrics.jsonl").write_text('{"step": 1}\n')
    with mine(tmp_path / place):
        before = tree(tmp_path)
        status, error = run("train", *FLAGS, "--run.name=mine", *more)
        assert status == 2 and error.count("\n") == 1
        assert error.startswith(f"error: {flag}, and {tmp_path / place} already has a run that is going on: process ")
        assert tree(tmp_path) == before


def test_one_folder_for_both(tmp_path):
    (tmp_path / "link").symlink_to("runs")
    args = SimpleNamespace(
        run=SimpleNamespace(dir=str(tmp_path / "runs"), name="a"), ckpt=SimpleNamespace(path=str(tmp_path / "link/a"))
    )
    with resume.own_folders(args), pytest.raises(ConfigError, match="going on"), mine(tmp_path / "runs/a"):
        pass
    with mine(tmp_path / "runs/a"):
        pass


def test_smoke(run, tmp_path):
    folder = tmp_path / "runs/smoke/mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    with mine(folder):
        status, error = run("smoke", *FLAGS, "--run.name=mine")
        assert (folder / "config.yaml").exists()
    assert status == 2
    assert error.startswith(f"error: run.name is mine, and {folder} already has a smoke run that is going on: process ")


STUDY = ("study", "--config", "study.yaml", "--output", "out")


@pytest.fixture
def study_file(tmp_path):
    (tmp_path / "study.yaml").write_text("name: s\nseeds: [1]\nmethods: {bapo: {arms: {group: BAPO}}}\n")


def test_study(run, tmp_path, study_file):
    with mine(tmp_path / "out"):
        status, error = run(*STUDY)
    assert status == 2 and error.startswith("error: --output is out, and out already has a study that is going on: ")


def test_a_study_none_of_whose_runs_makes_a_step(run, monkeypatch, study_file):
    monkeypatch.setattr(study, "_check", lambda _: ({}, 1))
    monkeypatch.setattr(study, "_run", lambda *_: Outcome(failed=["bapo-group-s1"]))
    status, error = run(*STUDY)
    assert status == 1 and error.startswith("error: 1 runs failed: bapo-group-s1; the output of each is in out/runs")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_study_that_gets_a_signal(run, monkeypatch, number, study_file):
    monkeypatch.setattr(study, "_check", lambda _: ({}, 1))
    monkeypatch.setattr(study, "_run", lambda *_: signal.raise_signal(number))
    status, error = run(*STUDY)
    assert status == 128 + number and error.startswith(f"stopped by {number.name} within the study, ")
    assert error.count("\n") == 1


def test_two_runs_of_one_name(tmp_path):
    """The first goes on, and is replaced as soon as it has been killed."""
    words = [*FLAGS, "--run.name=race"]
    first = subprocess.Popen(
        [sys.executable, "-c", RUN, "train", *words], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout.readline() == b"training\n"
    folder = tmp_path / "runs/race"
    record.RunRecord(folder).append(1, {"rollouts/total": 16})
    for more in ([], ["--actor.adam.lr=1e-5"], ["--run.overwrite"]):
        second = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "bapo_openrlhf.cli", "train", *words, *more],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        *imported, error = second.stderr.splitlines()
        assert second.returncode == 2 and second.stdout == ""
        assert error.startswith(f"error: run.name is race, and {folder} already has a run that is going on: process ")
        assert f"process {first.pid} on " in error
        assert all(line.startswith("import time:") for line in imported)
        assert not {"ray", "torch", "vllm", "deepspeed"} & {line.rpartition("|")[2].strip() for line in imported}
    assert [row["step"] for row in record.read_metrics(folder)] == [1]
    first.kill()
    first.wait()
    again = subprocess.run([sys.executable, "-c", RUN, "train", *words], cwd=tmp_path, input="", text=True)
    assert again.returncode == 0


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_the_first_step_ends_the_run_with_one_line(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "train", *FLAGS, "--run.name=mine"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == b"training\n"
    process.send_signal(number)
    assert process.communicate()[1].decode() == f"stopped by {number.name} before the first step\n"
    assert process.returncode == 128 + number and tree(tmp_path) == {}


def test_the_folders_are_free_after_the_run(run, tmp_path, monkeypatch):
    def launch(args, checked, signals, command):
        assert command == ["bapo-openrlhf", "train", *FLAGS, "--run.name=mine"]
        with pytest.raises(ConfigError, match="going on"), resume.own_folders(args):
            pass
        (tmp_path / "runs/mine/run.json").write_text("{}")
        raise ConfigError("bad")

    monkeypatch.setattr(preflight, "check_inputs", lambda args: SimpleNamespace(warnings=()))
    monkeypatch.setattr(preflight, "check_hub_models", lambda args: None)
    monkeypatch.setattr(start, "launch", launch)
    assert run("train", *FLAGS, "--run.name=mine") == (2, "error: bad\n")
    assert tree(tmp_path) == {"runs/mine/run.json": "{}"}
    assert not (tmp_path / "runs/mine/checkpoints").exists()

"""What a start writes to the run's folder before anything loads, and what the end adds. No Ray, no models."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bapo_openrlhf import config
from bapo_openrlhf.adapt.arithmetic import batch_arithmetic
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.config import Checked
from bapo_openrlhf.launch import start as launch
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import save_state


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(flag=value...) launches a run that trains nothing, and returns the record that the training would find."""
    monkeypatch.setattr(launch.cpu, "active", lambda: False)
    found = []

    def run(*, prompts: int | None = None, candidates: int = 1, fails: bool = False, **flags) -> tuple[dict, dict]:
        words = {
            "algorithm": "bapo_grpo",
            "actor.model_name_or_path": "model",
            "reward.remote_url": "reward.py",
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "train.batch_size": 8,
            "train.micro_batch_size": 2,
            "run.dir": tmp_path / "runs",
            "run.name": "mine",
            "ckpt.path": tmp_path / "checkpoints",
        } | {name.replace("__", "."): value for name, value in flags.items()}
        argv = [f"--{name}" if value is True else f"--{name}={value}" for name, value in words.items()]

        def train(args) -> None:
            run.checked = args.checked
            folder = Path(args.run.dir) / args.run.name
            found.append((record.read_run(folder), sorted(path.name for path in folder.iterdir())))
            record.RunRecord(folder).append(1, {"rollouts/total": 16})
            record.RunRecord(folder).append_rows(record.GROUPS, 1, [{"uid": 0}])
            if fails:
                raise KeyboardInterrupt

        monkeypatch.setattr(launch, "_train", train)
        args = arguments.parse(argv)
        launch.launch(args, Checked(batch_arithmetic(args), prompts=prompts, candidates=candidates, kl_coef=0.25))
        return found[-1][0], record.read_summary(tmp_path / "runs" / "mine")

    run.found = found
    return run


def test_run_json_is_there_before_training(start):
    about, summary = start(prompts=10, train__num_episodes=3, train__seed=7)
    assert (about["name"], about["algorithm"], about["seed"], about["total_steps"]) == ("mine", "bapo_grpo", 7, 9)
    begun = datetime.fromisoformat(about["started"])
    assert begun.utcoffset().total_seconds() == 0 and abs((datetime.now(UTC) - begun).total_seconds()) < 600
    assert about["versions"]["python"].startswith("3.") and "command" in about and "commit" in about
    assert "resumed" not in about
    assert (summary["seed"], summary["rollouts"], summary["started"]) == (7, 16, about["started"])
    assert start.found[0][1] == ["run.json"]


def test_the_run_gets_what_the_checks_worked_out(start, tmp_path):
    """The checkpoint is chosen last, because that may delete what a crash left unfinished."""
    about, _ = start(prompts=10, candidates=3)
    assert about["total_steps"] == 1  # a step takes 4 x 3 prompts from the data
    assert (start.checked.candidates, start.checked.kl_coef, start.checked.resume_tag) == (3, 0.25, None)
    assert "checked" not in " ".join(about["config"])
    store, model = CheckpointStore(tmp_path / "checkpoints", critic=False), tmp_path / "checkpoints/_actor/global_step2"
    save_state(store.begin("global_step2"), {})
    model.mkdir(parents=True)
    (model / "model.pt").write_text("weights")
    store.complete("global_step2", 2)
    start(ckpt__load_enable=True)
    assert (start.checked.resume_tag, start.checked.kl_coef) == ("global_step2", 0.25)


def test_steps_that_nobody_knows(start):
    assert start()[0]["total_steps"] is None


def test_every_flag_is_in_it_as_it_was_given(start):
    about, _ = start(
        adapt__kl_target="behaviour", algo__kl__init_coef=0.02, data__prompt_dataset="data.jsonl", adapt__c1="0.1"
    )
    flags = about["config"]
    assert flags["algo.kl.init_coef"] == 0.02  # OpenRLHF is given 0
    assert flags["data.prompt_dataset"] == "data.jsonl" and flags["adapt.c1"] == "0.1" and flags["adapt.c2"] is None
    assert flags["actor.adam.lr"] > 0 and flags["verifier.timeout"] == 60.0 and flags["algorithm"] == "bapo_grpo"
    known = {action.dest for action in arguments.build_parser("prog")._actions} - {"help"}
    assert set(flags) >= {f"{prefix}.{item.name}" for prefix, kind in config.GROUPS.items() for item in fields(kind)}
    assert not [name for name in flags if name.startswith(("adapt.", "run.", "verifier.")) and name not in known]
    assert len(set(flags) & known) > 0.95 * len(known)


def test_keys_are_not_written_down(start, monkeypatch, tmp_path):
    monkeypatch.setattr(record.sys, "orig_argv", ["python", "--logger.wandb.key", "s3cret"])
    about, _ = start(logger__wandb__key="s3cret")
    assert about["config"]["logger.wandb.key"] == "***" and about["command"].endswith("--logger.wandb.key '***'")
    for path in (tmp_path / "runs" / "mine").iterdir():
        assert "s3cret" not in path.read_text(), path.name
    assert start()[0]["config"]["logger.wandb.key"] is None


def test_a_run_that_starts_anew_begins_with_an_empty_record(start, tmp_path):
    start()
    with pytest.raises(KeyboardInterrupt):
        start(fails=True)
    assert start.found[-1][1] == ["run.json"]
    assert [row["step"] for row in record.read_metrics(tmp_path / "runs" / "mine")] == [1]
    assert record.read_summary(tmp_path / "runs" / "mine") == {}  # it did not end


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_without_batch_adaptation_openrlhfs_checkpoint_decides(start, tmp_path, algorithm):
    start(algorithm=algorithm, ckpt__load_enable=True)
    about, _ = start(algorithm=algorithm, ckpt__load_enable=True)
    assert "resumed" not in about and start.found[-1][1] == ["run.json"]
    (tmp_path / "checkpoints" / "_actor").mkdir(parents=True)
    about, _ = start(algorithm=algorithm, ckpt__load_enable=True)
    assert len(about["resumed"]) == 1
    assert start.found[-1][1] == ["groups.jsonl", "metrics.jsonl", "run.json"]
    # asked for nothing, it goes on from nothing
    assert "resumed" not in start(algorithm=algorithm)[0]


def test_it_is_plain_json(start, tmp_path):
    start(adapt__c2="1/8")
    text = (tmp_path / "runs" / "mine" / "run.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_with_a_gpu_flash_attn_need_not_be_there(monkeypatch):
    """OpenRLHF is imported after this."""
    monkeypatch.setattr(launch.cpu, "active", lambda: False)

    def do_without():
        raise InterruptedError

    monkeypatch.setattr(launch.flash_attention, "do_without", do_without)
    with pytest.raises(InterruptedError):
        launch._train(None)

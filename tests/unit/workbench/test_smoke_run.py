"""A smoke run around a stand-in for `train` (fake_train.py): the stages, the kill, and each verdict."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bapo_openrlhf import user_file
from bapo_openrlhf.cli import main
from bapo_openrlhf.record.run_record import read_metrics
from bapo_openrlhf.workbench.smoke import run

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[2] / "configs" / "bapo_grpo_countdown_qwen2.5_math_1.5b.yaml"
published = user_file.load("models", HERE.parents[1] / "stack" / "preset_models.py")


@pytest.fixture
def smoke(tmp_path, monkeypatch, capsys, tokenizer_folder):
    """smoke(fault, *words): the status and the printed lines of a smoke run."""
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", "1")
    monkeypatch.setattr(run, "TRAIN", (str(HERE / "fake_train.py"),))
    config = published.transformers.Qwen2Config(
        vocab_size=260, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    config.save_pretrained(tmp_path / "model")
    for file in tokenizer_folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    published.make_data(tmp_path, "countdown", images=False)

    def start(fault="", *words):
        monkeypatch.setenv("FAKE_FAULT", fault)
        # A busy machine takes seconds for what does not hang.
        monkeypatch.setattr(run, "PATIENCE", 10.0 if fault in ("no checkpoint", "survivor") else 120.0)
        flags = [f"--actor.model_name_or_path={tmp_path}/model", f"--data.prompt_dataset={tmp_path}/data.jsonl",
                 f"--run.dir={tmp_path}/runs", "--run.name=mine"]  # fmt: skip
        return main.run(["smoke", "--config", str(CONFIG), *flags, *words]), capsys.readouterr().out.splitlines()

    return start


def test_a_good_run_passes(smoke, tmp_path):
    status, lines = smoke()
    assert status == 0, lines
    names = [line.split("  ")[1] for line in lines if line.startswith("  ") and " -> " not in line]
    assert [name for name in names if not name.startswith("yes ")] == [
        "checks", "small model", "start", "step 1", "step 2", "save", "kill", "resume", "step 3", "end"]  # fmt: skip
    assert sum(line.startswith("  yes ") for line in lines) == 7
    assert "  model num_hidden_layers: 3 -> 2 (more layers are the same again)" in lines
    assert lines[-2].startswith("passed in ") and "plan" in lines[-1]
    folder = tmp_path / "runs" / "smoke" / "mine"
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "reward.py", "first.log", "resumed.log", "run"}
    assert [row["step"] for row in read_metrics(folder / "run")] == [1, 2, 3]
    assert smoke()[0] == 0  # the folder is its own, and may be used again


@pytest.mark.parametrize(("fault", "last"), [
    ("start", "failed in start: the run ended with status 1; error: no memory left"),
    ("no checkpoint", "failed in save: nothing happened for 10 s"),
    pytest.param("survivor", "failed in kill: nothing happened for 10 s", marks=pytest.mark.slow),
    ("resume", "failed in resume: the run ended with status 1; error: no memory left"),
])  # fmt: skip
def test_a_failure_names_the_stage(smoke, fault, last):
    status, lines = smoke(fault)
    assert status == 1 and lines[-1].startswith(last), lines[-1]
    assert not any(line.startswith("passed") for line in lines)


@pytest.mark.parametrize(("fault", "contradiction"), [
    ("from the beginning", "its steps are [1, 2, 1,"),
    ("lost group", "step 3: 1 groups are counted, 2 were generated"),
    ("few responses", "step 3: 2 groups are counted, 2 were generated with 14 responses"),
    ("failed group", "step 3: 1 groups failed"),
    ("loss", "step 3: policy_loss is not a finite number"),
    ("no gradient", "no step had a gradient above 0"),
    ("weights", "all are as before"),
    ("engines", "step 3: their KL divergence is 0.0031 a token, and rounding explains 0.003"),
])  # fmt: skip
def test_what_the_record_contradicts_is_said(smoke, fault, contradiction):
    status, lines = smoke(fault)
    [wrong] = [line for line in lines if line.startswith("  NO ")]
    assert status == 1 and f": {contradiction}" in wrong and lines[-1].startswith("failed after "), lines


def test_a_method_may_ask_for_fewer_responses(smoke):
    status, lines = smoke("few responses", "--algorithm", "bapo_grpo", "--adapt.method", "ar3po")
    assert status == 0, lines


def test_a_broken_reward_file_fails_the_checks_and_so_does_a_run_without_a_record_of_its_steps(smoke, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('answer')\n")
    said = f"reward.remote_url {file}: reward_func raised KeyError: 'answer'"
    asynchronous = ("--algorithm=grpo", "--train.async_enable", "--train.colocate_all=false")
    for words, what in (((f"--reward.remote_url={file}",), said), (asynchronous, "train.async_enable is True; ")):
        status, lines = smoke("", *words)
        assert status == 1 and lines[-1].startswith(f"failed in checks: {what}")


def test_a_folder_that_is_no_smoke_run_is_not_deleted(smoke, tmp_path):
    folder = tmp_path / "runs" / "smoke" / "mine"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years")
    status, lines = smoke()
    assert status == 1 and "holds no smoke run" in lines[-1] and (folder / "thesis.tex").exists()


def test_nothing_is_left_of_a_smoke_run_that_is_told_to_end(smoke, monkeypatch):
    """SIGTERM while `train` goes on, which is in a session of its own."""
    marks = []

    def end(smoke_run, *_):
        marks.append(smoke_run.stages.mark)
        assert run.survivors(marks[0])
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run.Smoke, "_follow", end)
    before = signal.getsignal(signal.SIGTERM)
    assert smoke()[0] == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
    assert not run.survivors(marks[0])


@pytest.mark.parametrize("learned", [True, False])
def test_an_adapter_that_torch_wrote_counts(tmp_path, learned):
    """OpenRLHF writes it so under ZeRO-3."""
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    save_file({"weight": torch.ones(2)}, before / "model.safetensors")
    factors = {"weight.lora_A": torch.ones(2), "weight.lora_B": torch.full((2,), float(learned))}
    torch.save(factors, after / "adapter_model.bin")
    assert run.changed_weights(before, after) is learned

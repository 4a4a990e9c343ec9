"""What `bapo-openrlhf warmup` refuses before a model loads."""

from __future__ import annotations

import json

import pytest

from bapo_openrlhf.cli import main as cli


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A file of flags that is right, and a function that writes one with changes."""
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", "1")
    model = tmp_path / "model"
    for name in ("model", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen2"}')
        (tmp_path / name / "pytorch_model.bin").touch()
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(3 * (json.dumps({"input": "1+1", "solution": "1 + 1 = 2"}) + "\n"))
    (tmp_path / "empty.jsonl").write_text(json.dumps({"input": "1+1", "solution": " "}) + "\n")
    file = tmp_path / "warmup.yaml"
    file.write_text(
        f"model: {{model_name_or_path: {model}}}\n"
        f"data: {{dataset: {tmp_path}/rows.jsonl}}\n"
        "train: {batch_size: 2, micro_batch_size: 1}\n"
        f"ds: {{attn_implementation: eager}}\nckpt: {{output_dir: {tmp_path}/out}}\n"
    )
    return lambda *more: ["warmup", "--config", str(file), *(word.format(here=tmp_path) for word in more)]


BAD = {
    "--model.model_name_or_path={here}/none": "there is no such model folder",
    "--model.model_name_or_path={here}": "the folder has no config.json",
    "--model.model_name_or_path={here}/bare": "/bare; the folder has no tokenizer",
    "--ckpt.output_dir={here}/model": "another one than the model's",
    "--ckpt.output_dir={here}/bare": "which already has a model",
    "--ckpt.output_dir={here}/rows.jsonl": "it must be a folder",
    "--data.dataset={here}/none.jsonl": "there is no such file",
    "--data.dataset={here}/empty.jsonl": "row 1: solution is ' '",
    "--data.dataset_probs=0.5,0.5": "data.dataset_probs is 0.5,0.5",
    "--data.output_key=answer": "row 1: no column 'answer' (data.output_key); it has input, solution",
    "--ds.attn_implementation=sdpa": "ds.attn_implementation is sdpa",
    "--ds.load_in_4bit": "ds.load_in_4bit is True",
    "--train.micro_batch_size=3": "train.batch_size is 2; it must be a multiple of 3",
    "--train.batch_size=8": "train.batch_size is 8; it must be at most 6 = rows 3 x train.max_epochs 2",
    "--adam.lr=2": "adam.lr is 2.0",
    "--lr_scheduler=none": "lr_scheduler is none",
    "--train.max_epochs=0": "train.max_epochs is 0",
    "--train.max_epoch_s=1": "unknown flag --train.max_epoch_s; did you mean --train.max_epochs",
    "--data.multiturn": "OpenRLHF refuses this configuration: ",
    "--ds.packing_samples": "packed samples need flash_attention_2",
}


@pytest.mark.parametrize(("word", "message"), BAD.items(), ids=BAD)
def test_bad_input(words, capsys, word, message):
    assert cli.run(words(word)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("data: {input: x}", "unknown flag data.input"), ("train: {batch_size: 8}", "train.batch_size is 8")],
)
def test_files_that_are_given_one_by_one(words, capsys, tmp_path, text, message):
    (tmp_path / "more.yaml").write_text(text)
    assert cli.run(words("--config", "{here}/more.yaml")) == 2
    assert message in capsys.readouterr().err


def test_on_gpus_each_has_a_process_of_deepspeeds_launcher(words, monkeypatch, capsys):
    calls = []
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", "0")
    monkeypatch.setattr("subprocess.run", lambda command: calls.append(command) or type("Done", (), {"returncode": 1}))
    given = words("--ds.attn_implementation=sdpa")
    assert cli.run(given) == 1
    runner = ["-m", "deepspeed.launcher.runner", "--no_local_rank", "--module", "bapo_openrlhf.cli"]
    assert [call[1:] for call in calls] == [[*runner, *given]]
    assert "error: the warm-up failed" in capsys.readouterr().err

"""Rotary frequencies of every role after loading, beside those of transformers without DeepSpeed.

ZeRO stage 3 rounds those of the rope type `default` to bfloat16 (see `training/worker/mended_models.py`).
In `make test`, test_resume.py has them in two runs.
"""

import json

import pytest
import torch
import transformers
from one_process import run_script
from rotary_workers import CASES, ROPE_TYPES, noted
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
BEFORE = {"original_max_position_embeddings": 1024}  # of the training, for the types that stretch it
MORE = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 8.0, **BEFORE},
    "longrope": {"factor": 8.0, "short_factor": [1 + i / 7 for i in range(16)], "long_factor": [3.0] * 16, **BEFORE},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BEFORE},
    "proportional": {"partial_rotary_factor": 0.5},
}


def config_of(name):
    if name == "layers":
        kinds = ["full_attention", "sliding_attention"]
        return transformers.Gemma3TextConfig(**SIZES, layer_types=kinds)
    if name == "vision":
        rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
        sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
        return transformers.Qwen2_5_VLConfig(text_config=SIZES | {"rope_parameters": rope}, vision_config=sizes)
    return transformers.Qwen3Config(
        **SIZES, rope_parameters={"rope_type": name, "rope_theta": 10000.0, **MORE.get(name, {})}
    )


def kind_of(name):
    return AutoModelForImageTextToText if name == "vision" else AutoModelForCausalLM


@pytest.fixture(scope="module")
def folder(workspace):
    folder = workspace / "rotary"
    for name in ("default", *ROPE_TYPES, "layers", "vision"):
        torch.manual_seed(0)
        kind_of(name).from_config(config_of(name), dtype=torch.bfloat16).save_pretrained(folder / name)
        for file in (workspace / "model").glob("tok*"):
            (folder / name / file.name).write_bytes(file.read_bytes())
    (folder / "rows.jsonl").write_text(json.dumps({"input": "1+1=", "solution": "2"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def buffers(folder):
    run_script("rotary_workers.py", folder)
    return torch.load(folder / "buffers.pt")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_those_of_transformers_to_the_last_bit(buffers, folder, case):
    wanted = noted(kind_of(case[0]).from_pretrained(folder / case[0], dtype=torch.bfloat16))
    assert sum(isinstance(value, torch.Tensor) for value in wanted.values()) >= 2
    for role, ours in buffers[case].items():
        ours = {next(name for name in wanted if full.endswith(name)): value for full, value in ours.items()}
        assert ours.keys() == wanted.keys(), role
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert ours[name].dtype == value.dtype == torch.float32 and torch.equal(ours[name], value), (role, name)
            else:
                assert ours[name] == value, (role, name)


def test_each_role_is_compared(buffers):
    roles = {kind: set(buffers["default", kind, 3]) for kind in ("Policy", "Critic", "Reference", "Reward")}
    assert roles == {
        "Policy": {"actor", "ema_model", "resumed"}, "Critic": {"critic"}, "Reference": {"model"}, "Reward": {"model"},
    }  # fmt: skip

"""Weights that cannot be loaded are refused by what their files say, before a model loads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import (
    INDEX,
    WHOLE,
    check_adapters,
    check_weights,
    positions_of,
    tensors_of,
)


def refused(folder) -> str:
    with pytest.raises(ConfigError) as error:
        tensors_of("critic.model_name_or_path", folder)
    return str(error.value).removeprefix(f"critic.model_name_or_path is {folder}; ")


def test_the_tensors_of_one_file_and_of_several(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    assert tensors_of("f", tmp_path) == {}  # of a .bin file nothing is said
    save_file({"a": np.zeros((2, 3)), "b": np.zeros(0)}, tmp_path / WHOLE, metadata={"format": "pt"})
    assert tensors_of("f", tmp_path).keys() == {"a", "b"}
    for name in "cd":
        save_file({name: np.ones(4)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in "cd"}}))
    assert tensors_of("f", tmp_path) == {"c": [4], "d": [4]}  # transformers also reads the index first
    (tmp_path / "d.safetensors").unlink()
    assert refused(tmp_path) == f"{INDEX} names the file d.safetensors, which is not there"


@pytest.mark.parametrize("size", [0, 7, 8, 40, -1])
def test_a_file_that_is_cut_short(tmp_path, size):
    save_file({"a": np.zeros(100)}, tmp_path / WHOLE)
    content = (tmp_path / WHOLE).read_bytes()[:size]
    (tmp_path / WHOLE).write_bytes(content)
    assert refused(tmp_path).startswith(f"{WHOLE} has {len(content)} bytes and is no whole safetensors file; ")


def test_a_file_with_more_than_its_header_says(tmp_path):
    save_file({"a": np.zeros(100)}, tmp_path / WHOLE)
    with (tmp_path / WHOLE).open("ab") as file:
        file.write(b"more")
    assert "is no whole safetensors file" in refused(tmp_path)


def test_the_pointer_that_git_leaves_in_the_place_of_a_large_file(tmp_path):
    (tmp_path / WHOLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1500\n")
    assert refused(tmp_path).endswith("if git made it, `git lfs pull` gets the weights")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tokenizer.json", "but there is no such file"),
        ("adapter_model.safetensors", "but they are those of an adapter: merge it into its model"),
        ("model-q4.gguf", "but they are in GGUF: `bapo-openrlhf model FILE.gguf DIR` makes a model folder of them"),
        ("__0_0.distcp", "but they are parts of a checkpoint, which is no model"),
    ],
)
def test_a_folder_without_weights(tmp_path, name, says):
    (tmp_path / name).touch()
    assert says in refused(tmp_path) and f"its weights must be in {WHOLE}" in refused(tmp_path)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """config.json and the shapes of a model that transformers has made and saved."""
    import transformers

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 20, "tie_word_embeddings": False}  # fmt: skip
    config = transformers.Qwen3Config(**sizes)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), tensors_of("f", folder)


def test_a_model_that_transformers_has_saved_can_be_trained(real, tmp_path):
    config, shapes = real
    for generates in (True, False):
        check_weights("f", tmp_path, config, shapes, generates=generates)
        check_weights("f", tmp_path, config, {}, generates=generates)
    headless = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    check_weights("f", tmp_path, config, headless, generates=False)  # a critic has another head
    check_weights("f", tmp_path, config | {"tie_word_embeddings": True}, headless, generates=True)


@pytest.mark.parametrize(
    ("changed", "without", "says"),
    [
        ({"model_type": None}, "", "its config.json has no model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "", "its weights are quantized (gptq), and a model that"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "", "it is a Qwen3ForSequenceClassification, which"),
        ({}, "model.layers.1.", "it has no weights of layer 1, and num_hidden_layers of its config.json is 3"),
        (
            {"hidden_size": 16},
            "",
            "vocab_size and hidden_size of its config.json are [20, 16], and its embeddings are [20, 8]",
        ),
        ({}, "lm_head.", "it has no weights lm_head.weight, the head over the vocabulary, and tie_word_embeddings is"),
    ],
)
def test_a_model_that_cannot_be_trained(real, tmp_path, changed, without, says):
    config, shapes = real
    config = {name: value for name, value in (config | changed).items() if value is not None}
    shapes = {name: shape for name, shape in shapes.items() if not (without and name.startswith(without))}
    with pytest.raises(ConfigError) as error:
        check_weights("critic.model_name_or_path", tmp_path, config, shapes, generates=True)
    assert str(error.value).startswith(f"critic.model_name_or_path is {tmp_path}; {says}")


def test_adapters_are_of_matrices_of_the_model(real):
    config, shapes = real
    check_adapters("m", "all-linear", config, shapes)
    check_adapters("m", ["x"], config, {})  # its weights are in a .bin file
    check_adapters("m", ["q_proj", "self_attn.v_proj", "lm_head"], config, shapes)
    names = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    for name in ("q_proj,v_proj", "c_attn", "proj", "all-linear", "embed_tokens", "norm"):
        with pytest.raises(ConfigError) as error:
            check_adapters("actor.model_name_or_path m", ["q_proj", name], config, shapes)
        assert str(error.value) == (
            f"ds.lora.target_modules is q_proj {name}; {name} is no matrix of actor.model_name_or_path m, which has "
            f"{names}: give some of them, or leave the flag out for all"
            + ("; there are spaces between names, and no commas" if "," in name else "")
        )


def test_an_adapter_of_a_head_that_is_the_embeddings_is_refused(real):
    config, shapes = real
    untied = {"tie_word_embeddings": False}
    headless = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    for tied, files in ((config | {"tie_word_embeddings": True}, {}), ({}, headless), (config | untied, headless)):
        check_adapters("m", ["q_proj"], tied, files)
        check_adapters("m", "all-linear", tied, files)  # PEFT leaves the head out
        with pytest.raises(ConfigError, match=r"^ds\.lora\.target_modules is q_proj lm_head; .*tie_word_embeddings"):
            check_adapters("m", ["q_proj", "lm_head"], tied, files)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
    ],
)  # fmt: skip
def test_positions_are_those_of_vllm(kind, config):
    from transformers import AutoConfig
    from vllm.config.model import _get_and_verify_max_len

    config = {"max_position_embeddings": 64} | config
    read = AutoConfig.for_model(kind, **config)
    arch = SimpleNamespace(derived_max_model_len_and_key=(64, "max_position_embeddings"))
    longest = _get_and_verify_max_len(read, arch, None, None, False, None)
    assert positions_of(config | {"model_type": kind}) == longest


def test_positions_of_other_models():
    assert positions_of({"n_positions": 128}) == 128
    assert positions_of({}) == float("inf")

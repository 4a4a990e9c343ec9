"""Weights that cannot be loaded are refused by what their files say, before a model loads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import (
    INDEX,
    WHOLE,
    check_adapters,
    positions_of,
    shapes_of,
    weight_files,
)


def refused(folder) -> str:
    with pytest.raises(ConfigError) as error:
        weight_files("critic.model_name_or_path", folder)
    return str(error.value).removeprefix(f"critic.model_name_or_path is {folder}; ")


def shard(folder, *names, index=INDEX, ending="safetensors") -> None:
    """Write a file with a tensor for each name, and their index."""
    for name in names:
        save_file({name: np.ones(4)}, folder / f"{name}.{ending}")
    (folder / index).write_text(json.dumps({"weight_map": {name: f"{name}.{ending}" for name in names}}))


def test_the_tensors_of_one_file_and_of_several(tmp_path):
    save_file({"a": np.zeros((2, 3)), "b": np.zeros(0)}, tmp_path / WHOLE, metadata={"format": "pt"})
    (tmp_path / "pytorch_model.bin").touch()  # neither transformers nor vLLM reads it then
    assert shapes_of("f", tmp_path) == {"a": [2, 3], "b": [0]}
    (tmp_path / WHOLE).unlink()
    shard(tmp_path, "c", "d")
    assert shapes_of("f", tmp_path) == {"c": [4], "d": [4]}
    save_file({"e": np.ones(4)}, tmp_path / "consolidated.safetensors")  # vLLM reads only what the index names
    assert shapes_of("f", tmp_path) == {"c": [4], "d": [4]}
    (tmp_path / "d.safetensors").unlink()
    assert refused(tmp_path) == f"{INDEX} names the file d.safetensors, which is not there"


@pytest.mark.parametrize("zipped", [True, False])
def test_the_tensors_of_a_bin_file(tmp_path, zipped):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2, 3)}, path, _use_new_zipfile_serialization=zipped)
    (tmp_path / "training_args.bin").touch()
    assert shapes_of("f", tmp_path) == {"a": [2, 3]}
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=f"^f is {tmp_path}; pytorch_model.bin cannot be read: "):
        shapes_of("f", tmp_path)


@pytest.mark.parametrize(
    "second", ["new shards beside an old file", "a file that no index names", "another .bin file", "an adapter"]
)
def test_a_second_set_of_weights(tmp_path, second):
    """transformers and vLLM would load different ones."""
    save_file({"a": np.zeros(2)}, tmp_path / WHOLE)
    if second == "new shards beside an old file":
        shard(tmp_path, "c", "d")
        assert "transformers loads model.safetensors, and vLLM c.safetensors, d.safetensors; " in refused(tmp_path)
    elif second == "a file that no index names":
        save_file({"a": np.zeros(2)}, tmp_path / "old.safetensors")
        assert "transformers loads model.safetensors, and vLLM model.safetensors, old.safetensors; " in refused(
            tmp_path
        )
    elif second == "another .bin file":
        (tmp_path / WHOLE).unlink()
        for name in ("pytorch_model.bin", "adapter_model.bin"):
            (tmp_path / name).touch()
        assert "and vLLM adapter_model.bin, pytorch_model.bin; " in refused(tmp_path)
    else:
        (tmp_path / "adapter_config.json").write_text("{}")
        assert refused(tmp_path).startswith("it has weights and the adapter of adapter_config.json")


@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1\n", "[]", "{}", '{"weight_map": 3}'])
@pytest.mark.parametrize("name", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_that_names_no_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert refused(tmp_path).startswith(f"{name} must be an object whose weight_map says the file of each tensor")


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


def test_adapters_are_of_matrices_of_the_model():
    layer = {f"model.layers.0.{part}_proj.weight": (2, 2) for part in ("self_attn.q", "self_attn.v", "mlp.up")}
    shapes = layer | {"model.embed_tokens.weight": (3, 2), "model.norm.weight": (2,)}
    check_adapters("m", "all-linear", shapes, tied=False)
    check_adapters("m", ["q_proj", "self_attn.v_proj", "lm_head"], shapes, tied=False)
    for name in ("q_proj,v_proj", "c_attn", "proj", "all-linear", "embed_tokens", "norm"):
        with pytest.raises(ConfigError) as error:
            check_adapters("actor.model_name_or_path m", ["q_proj", name], shapes, tied=False)
        assert str(error.value) == (
            f"ds.lora.target_modules is q_proj {name}; {name} is no matrix of actor.model_name_or_path m, which has "
            "lm_head, q_proj, up_proj, v_proj: give some of them, or leave the flag out for all"
            + ("; there are spaces between names, and no commas" if "," in name else "")
        )


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

"""Weights that cannot be loaded, and models with other tokens, are refused by what files say, before a model loads."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save, save_file

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch import model_files
from bapo_openrlhf.launch.model_files import INDEX, WHOLE, check_adapters, positions_of, shapes_of, weight_files


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as error:
        weight_files(f"critic.model_name_or_path is {folder}", folder)
    return str(error.value).removeprefix(f"critic.model_name_or_path is {folder}; ")


def shard(folder, *names) -> None:
    """Write a file with a tensor for each name, and their index."""
    for name in names:
        save_file({name: np.ones(4)}, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in names}}))


def test_the_tensors_of_one_file_and_of_several(tmp_path):
    save_file({"a": np.zeros((2, 3)), "b": np.zeros(0)}, tmp_path / WHOLE, metadata={"format": "pt"})
    (tmp_path / "pytorch_model.bin").touch()  # neither transformers nor vLLM reads it then
    assert shapes_of("f is x", tmp_path) == {"a": [2, 3], "b": [0]}
    (tmp_path / WHOLE).unlink()
    shard(tmp_path, "c", "d")
    assert shapes_of("f is x", tmp_path) == {"c": [4], "d": [4]}
    save_file({"e": np.ones(4)}, tmp_path / "consolidated.safetensors")  # vLLM reads only what the index names
    assert shapes_of("f is x", tmp_path) == {"c": [4], "d": [4]}
    (tmp_path / "d.safetensors").unlink()
    assert refusal(tmp_path) == f"{INDEX} names the file d.safetensors, which is not there"


@pytest.mark.parametrize("zipped", [True, False])
def test_the_tensors_of_a_bin_file(tmp_path, zipped):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2, 3)}, path, _use_new_zipfile_serialization=zipped)
    (tmp_path / "training_args.bin").touch()
    assert shapes_of("f is x", tmp_path) == {"a": [2, 3]}
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"^f is x; pytorch_model\.bin cannot be read: "):
        shapes_of("f is x", tmp_path)


@pytest.mark.parametrize(("first", "more", "engines"), [
    (WHOLE, ["c.safetensors", "d.safetensors"], "c.safetensors, d.safetensors"),  # shards beside an old file
    (WHOLE, ["old.safetensors"], "model.safetensors, old.safetensors"),  # that no index names
    ("pytorch_model.bin", ["adapter_model.bin"], "adapter_model.bin, pytorch_model.bin"),
])  # fmt: skip
def test_a_second_set_of_weights(tmp_path, first, more, engines):
    """transformers and vLLM would load different ones."""
    for name in (first, *more):
        save_file({"a": np.zeros(2)}, tmp_path / name)
    if len(more) > 1:
        shard(tmp_path, "c", "d")
    assert f"transformers loads {first}, and vLLM {engines}; " in refusal(tmp_path)


def test_weights_beside_an_adapter(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / WHOLE)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1\n", "[]", "{}", '{"weight_map": 3}'])
@pytest.mark.parametrize("name", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_that_names_no_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert refusal(tmp_path).startswith(f"{name} must ")


WEIGHTS = save({"a": np.zeros(100)})


@pytest.mark.parametrize(
    "content", [*(WEIGHTS[:size] for size in (0, 7, 8, 40, -1)), WEIGHTS + b"more", b"version https://git-lfs"]
)
def test_a_file_that_is_not_whole(tmp_path, content):
    """It is cut short, or longer than its header says, or the pointer that git leaves in the place of a large file."""
    (tmp_path / WHOLE).write_bytes(content)
    assert refusal(tmp_path).startswith(f"{WHOLE} has {len(content)} bytes ")


@pytest.mark.parametrize(("name", "says"), [
    ("tokenizer.json", "no such file"),
    ("adapter_model.safetensors", "an adapter"),
    ("model-q4.gguf", "`bapo-openrlhf model FILE.gguf DIR`"),
    ("__0_0.distcp", "a checkpoint"),
])  # fmt: skip
def test_a_folder_without_weights(tmp_path, name, says):
    (tmp_path / name).touch()
    assert says in refusal(tmp_path) and WHOLE in refusal(tmp_path)


def test_adapters_are_of_matrices_of_the_model():
    layer = {f"model.layers.0.{part}_proj.weight": (2, 2) for part in ("self_attn.q", "self_attn.v", "mlp.up")}
    shapes = layer | {"model.embed_tokens.weight": (3, 2), "model.norm.weight": (2,)}
    check_adapters("m", "all-linear", shapes, tied=False)
    check_adapters("m", ["q_proj", "self_attn.v_proj", "lm_head"], shapes, tied=False)
    for name in ("q_proj,v_proj", "c_attn", "proj", "all-linear", "embed_tokens", "norm"):
        with pytest.raises(ConfigError, match=rf"^ds\.lora\.target_modules is q_proj {name}; {name} ") as error:
            check_adapters("actor.model_name_or_path m", ["q_proj", name], shapes, tied=False)
        assert "lm_head, q_proj, up_proj, v_proj" in str(error.value)
        assert ("commas" in str(error.value)) == ("," in name)


@pytest.mark.parametrize(("kind", "config"), [
    ("llama", {}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    ("gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
])  # fmt: skip
def test_positions_are_those_of_vllm(kind, config):
    from transformers import AutoConfig
    from vllm.config.model import _get_and_verify_max_len

    config = {"max_position_embeddings": 64} | config
    read = AutoConfig.for_model(kind, **config)
    arch = SimpleNamespace(derived_max_model_len_and_key=(64, "max_position_embeddings"))
    assert positions_of(config | {"model_type": kind}) == _get_and_verify_max_len(read, arch, None, None, False, None)


def test_positions_of_other_models():
    assert positions_of({"n_positions": 128}) == 128
    assert positions_of({}) == float("inf")


TOKENS = ["<pad>", "<eos>", "a", "b"]


def tokenizer(tokens, *, unigram=False, added=()) -> str:
    """A tokenizer.json, as far as it says what the tokens are."""
    vocab = [[token, -1.0] for token in tokens] if unigram else {token: n for n, token in enumerate(tokens)}
    more = [{"id": len(tokens) + n, "content": token} for n, token in enumerate(added)]
    return json.dumps({"model": {"type": "Unigram" if unigram else "BPE", "vocab": vocab}, "added_tokens": more})


@pytest.fixture
def compared(tmp_path):
    """compared(): the refusal of reward/ beside actor/, which fit together at first; "" without one."""
    for name in ("actor", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 5, "max_position_embeddings": 64}')
        (tmp_path / name / "tokenizer.json").write_text(tokenizer(TOKENS, added=["<think>"]))
    actor, data = SimpleNamespace(model_name_or_path=str(tmp_path / "actor")), SimpleNamespace(max_len=64)

    def check() -> str:
        args, flag, folder = SimpleNamespace(actor=actor, data=data), "reward.model_name_or_path", tmp_path / "reward"
        try:
            model_files.check_same_tokens(args, flag, str(folder), model_files.config_of(flag, folder))
        except ConfigError as error:
            return str(error)
        return ""

    return check


def test_a_model_that_reads_the_same_tokens(compared, tmp_path):
    assert compared() == ""
    for name, more in (("actor", []), ("reward", ["<pad2>"])):  # it may have tokens that the actor never writes
        (tmp_path / name / "tokenizer.json").write_text(tokenizer([*TOKENS, "<think>", *more], unigram=True))
    assert compared() == ""
    (tmp_path / "reward" / "tokenizer.json").unlink()  # it may be one of another form
    assert compared() == ""
    (tmp_path / "actor").rename(tmp_path / "on the hub")
    assert compared() == ""


@pytest.mark.parametrize("part", ["text_config", None])
def test_too_few_embeddings_or_positions(compared, tmp_path, part):
    def write(**sizes):
        (tmp_path / "reward" / "config.json").write_text(json.dumps({part: sizes} if part else sizes))

    write(vocab_size=5)  # it does not say how many positions
    assert compared() == ""
    write(vocab_size=4)
    says = compared()
    assert says.startswith(f"reward.model_name_or_path is {tmp_path}/reward; vocab_size ")
    assert " is 4, " in says and " 5 " in says and "'<think>'" in says
    write(max_position_embeddings=63)
    assert compared().startswith("data.max_len is 64; it must be at most 63, ")


@pytest.mark.parametrize(("tokens", "added", "says"), [
    (["<pad>", "<eos>", "b", "a"], ["<think>"], "its token 2 is 'b', and it must be 'a' as in actor.model_name"),
    (TOKENS, [], "its token 4 is None, and it must be '<think>' as in actor.model_name"),
])  # fmt: skip
def test_a_model_that_reads_other_tokens(compared, tmp_path, tokens, added, says):
    (tmp_path / "reward" / "tokenizer.json").write_text(tokenizer(tokens, added=added))
    assert says in compared()

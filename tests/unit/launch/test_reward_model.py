"""A reward model without a head, or with other tokens than the actor, is refused before anything loads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import tensors_of
from bapo_openrlhf.launch.reward_model import check_reward_model

TOKENS = ["<pad>", "<eos>", "a", "b"]


def tokenizer(tokens, *, unigram=False, added=()) -> str:
    """A tokenizer.json, as far as it says what the tokens are."""
    vocab = [[token, -1.0] for token in tokens] if unigram else {token: n for n, token in enumerate(tokens)}
    more = [{"id": len(tokens) + n, "content": token} for n, token in enumerate(added)]
    return json.dumps({"model": {"type": "Unigram" if unigram else "BPE", "vocab": vocab}, "added_tokens": more})


@pytest.fixture
def folders(tmp_path):
    """actor/ and reward/, which fit together."""
    for name in ("actor", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen2"}')
        (tmp_path / name / "pytorch_model.bin").touch()
        (tmp_path / name / "tokenizer.json").write_text(tokenizer(TOKENS, added=["<think>"]))
    save_file({"score.weight": np.zeros((1, 2)), "model.norm.weight": np.zeros(2)},
              tmp_path / "reward" / "model.safetensors")  # fmt: skip
    return tmp_path


def check(folders, prefix="score") -> None:
    models = {name: SimpleNamespace(model_name_or_path=str(folders / name)) for name in ("actor", "reward")}
    folder = folders / "reward"
    weights = tensors_of("reward.model_name_or_path", folder) if folder.is_dir() else {}
    check_reward_model(SimpleNamespace(**models, ds=SimpleNamespace(value_head_prefix=prefix)), weights)


def refused(folders, prefix="score") -> str:
    with pytest.raises(ConfigError, match=f"^reward.model_name_or_path is {folders}/reward; ") as error:
        check(folders, prefix)
    return str(error.value)


def test_one_that_fits(folders):
    check(folders)
    for name, more in (("actor", []), ("reward", ["<pad2>"])):  # it may have tokens that the actor never writes
        (folders / name / "tokenizer.json").write_text(tokenizer([*TOKENS, "<think>", *more], unigram=True))
    check(folders)


def test_two_scores(folders):
    save_file({"score.weight": np.zeros((2, 4))}, folders / "reward" / "model.safetensors")
    assert refused(folders).endswith("its head score.weight gives 2 scores, and it must give one")


def test_a_configuration_that_is_no_object(folders):
    (folders / "reward" / "config.json").write_text("[3]")
    assert refused(folders).endswith("its config.json must be an object, and is [3]")


def test_no_head(folders):
    assert "it has no weights value.weight, the head that gives a score" in refused(folders, "value")
    (folders / "reward" / "config.json").write_text('{"value_head_prefix": "score"}')  # it wins, as in OpenRLHF
    check(folders, "value")
    save_file({"lm_head.weight": np.zeros(2)}, folders / "reward" / "part.safetensors", metadata={"format": "pt"})
    index = {"weight_map": {"lm_head.weight": "part.safetensors"}}
    (folders / "reward" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "it has no weights score.weight" in refused(folders)


@pytest.mark.parametrize(
    ("tokens", "added", "says"),
    [
        (["<pad>", "<eos>", "b", "a"], ["<think>"], "its token 2 is 'b', and it must be 'a' as in actor.model_name"),
        (TOKENS, [], "its token 4 is None, and it must be '<think>' as in actor.model_name"),
    ],
)
def test_other_tokens(folders, tokens, added, says):
    (folders / "reward" / "tokenizer.json").write_text(tokenizer(tokens, added=added))
    assert says in refused(folders)


def test_what_is_not_here_is_not_looked_at(folders):
    (folders / "reward" / "model.safetensors").unlink()
    (folders / "reward" / "tokenizer.json").rename(folders / "reward" / "tokenizer.model")
    check(folders)
    (folders / "reward").rename(folders / "on the hub")
    check(folders)

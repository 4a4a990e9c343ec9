"""A critic or a reward model that reads other tokens than the actor writes is refused before anything loads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import check_same_tokens

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
        (tmp_path / name / "config.json").write_text('{"vocab_size": 5, "max_position_embeddings": 64}')
        (tmp_path / name / "tokenizer.json").write_text(tokenizer(TOKENS, added=["<think>"]))
    return tmp_path


def check(folders) -> None:
    args = SimpleNamespace(
        actor=SimpleNamespace(model_name_or_path=str(folders / "actor")), data=SimpleNamespace(max_len=64)
    )
    check_same_tokens(args, "reward.model_name_or_path", str(folders / "reward"))


def refusal(folders) -> str:
    with pytest.raises(ConfigError) as error:
        check(folders)
    return str(error.value)


def test_one_that_fits(folders):
    check(folders)
    for name, more in (("actor", []), ("reward", ["<pad2>"])):  # it may have tokens that the actor never writes
        (folders / name / "tokenizer.json").write_text(tokenizer([*TOKENS, "<think>", *more], unigram=True))
    check(folders)


@pytest.mark.parametrize("part", ["text_config", None])
def test_too_few_embeddings_or_positions(folders, part):
    def write(**sizes):
        (folders / "reward" / "config.json").write_text(json.dumps({part: sizes} if part else sizes))

    write(vocab_size=5)  # it does not say how many positions
    check(folders)
    write(vocab_size=4)
    said = refusal(folders)
    assert said.startswith(f"reward.model_name_or_path is {folders}/reward; vocab_size ")
    assert " is 4, " in said and " 5 " in said and "'<think>'" in said
    write(max_position_embeddings=63)
    assert refusal(folders).startswith("data.max_len is 64; it must be at most 63, ")


@pytest.mark.parametrize(
    ("tokens", "added", "says"),
    [
        (["<pad>", "<eos>", "b", "a"], ["<think>"], "its token 2 is 'b', and it must be 'a' as in actor.model_name"),
        (TOKENS, [], "its token 4 is None, and it must be '<think>' as in actor.model_name"),
    ],
)
def test_other_tokens(folders, tokens, added, says):
    (folders / "reward" / "tokenizer.json").write_text(tokenizer(tokens, added=added))
    assert says in refusal(folders)


def test_what_is_not_here_is_not_looked_at(folders):
    (folders / "reward" / "tokenizer.json").unlink()  # it may be one of another form
    check(folders)
    (folders / "reward").rename(folders / "on the hub")
    check(folders)

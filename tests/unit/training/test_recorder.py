"""Rows of groups.jsonl and answers.jsonl from OpenRLHF's samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

from fake_stack import generated_rows as rows  # noqa: E402
from fake_stack import generated_sample as sample  # noqa: E402

from bapo_openrlhf.adapt.group import Prompt  # noqa: E402
from bapo_openrlhf.record.answers import PromptStates  # noqa: E402
from bapo_openrlhf.training.recorder import answers_of  # noqa: E402


@pytest.fixture
def tokenizer():
    asked = []

    def decode(tokens, skip_special_tokens):
        assert skip_special_tokens
        asked.append(tokens.tolist())
        return " ".join(map(str, tokens.tolist()))

    return SimpleNamespace(decode=decode, asked=asked)


def test_answers_by_hand(tokenizer):
    states = PromptStates()
    first = [sample("p", 0.0, [0, 1, 1]), sample("p", 0.0, [0, 1]), sample("q", 1.0, [1]), sample("q", 0.0, [1])]
    (row,) = answers_of(rows(first, 2), states, tokenizer, 100)
    assert row == {
        "prompt": Prompt("p", "label").id,
        "kind": "failed",
        "text": "p",
        "label": "label",
        "response": "102 103",
        "reward": 0.0,
    }
    again = [sample("p", 0.0, [1]), sample("p", 0.5, [0, 0, 1, 1]), sample("q", 0.0, [1]), sample("q", 0.0, [1])]
    solved, failed = answers_of(rows(again, 2), states, tokenizer, 100)
    assert (solved["kind"], solved["response"], solved["reward"]) == ("solved", "103 104", 0.5)
    assert (failed["kind"], failed["text"], failed["response"]) == ("failed", "q", "101")
    assert len(tokenizer.asked) == 3
    assert answers_of(rows(again[:2], 2), states, tokenizer, 100) == [] and len(tokenizer.asked) == 3


def test_a_response_of_several_turns_and_an_empty_one(tokenizer):
    turns, empty = sample("p", 0.0, [0, 1, 0, 0, 1, 0]), sample("q", 0.0, [0, 0])
    one, two = answers_of(rows([turns, empty], 1), PromptStates(), tokenizer, 100)
    assert (one["response"], two["response"]) == ("102 103 104 105", "")


def test_a_group_that_failed_says_nothing_of_its_prompt(tokenizer):
    states = PromptStates()
    assert answers_of(rows([sample("p", None, [1]), sample("p", 0.0, [1])], 2), states, tokenizer, 9) == []
    assert len(answers_of(rows([sample("p", 0.0, [1])], 1), states, tokenizer, 9)) == 1

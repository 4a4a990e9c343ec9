"""Rows of groups.jsonl and answers.jsonl from OpenRLHF's samples."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402

from bapo_openrlhf.adapt.group import Prompt  # noqa: E402
from bapo_openrlhf.record.answers import PromptStates  # noqa: E402
from bapo_openrlhf.training.recorder import answers_of, generated_groups  # noqa: E402
from bapo_openrlhf.training.rollout import is_usable, usable_groups  # noqa: E402
from bapo_openrlhf.training.samples import groups_of  # noqa: E402


def sample(prompt: str, reward: float | None, mask: list[int], *, images=None, log_prob: float = -1.0) -> Experience:
    """A generated sample with tokens 100, 101, ..., of which `mask` says which the policy generated."""
    return Experience(
        sequences=torch.arange(100, 101 + len(mask))[None],
        action_mask=torch.tensor([mask]),
        rollout_log_probs=torch.full((1, len(mask)), log_prob),
        prompts=[prompt],
        labels=["label"],
        images=[images],
        mm_train_inputs=[None],
        rewards=None if reward is None else torch.tensor([reward]),
        truncated=torch.tensor([False]),
        info={},
    )


def rows(samples: list[Experience], size: int, **changed) -> list:
    return generated_groups(samples, size, **{"source": "fresh", "first_uid": 0, "usable": is_usable} | changed)


@given(
    groups=st.lists(
        st.lists(st.sampled_from([None, 0.0, 0.1, 0.2, 1.0, math.nan]), min_size=2, max_size=2), max_size=6
    ),
    first=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_numbers_are_those_of_the_layers_groups(groups, first):
    """nan stands for a log-prob that is no number: such a group fails as one without a reward does."""
    samples = [
        sample(
            f"prompt {n}", 1.0 if reward != reward else reward, [0, 1, 1], log_prob=math.nan if reward != reward else -1
        )
        for n, rewards in enumerate(groups)
        for reward in rewards
    ]
    found = rows(samples, 2, first_uid=first)
    layer = groups_of(usable_groups(samples, 2), 2, first_uid=first, step=0, policy_step=0)
    assert [(group.uid, group.prompt.id, group.mean) for group in found[: len(layer)]] == [
        (group.uid, group.prompt.id, group.mean) for group in layer
    ]
    assert [group.uid for group in found] == list(range(first, first + len(groups)))
    assert all(group.mean is None for group in found[len(layer) :])
    assert {group.prompt.text for group in found} == {f"prompt {n}" for n in range(len(groups))}


def test_row_by_hand():
    samples = [sample("p", 1.0, [0, 1, 1, 0, 1]), sample("p", 0.0, [0, 1]), sample("p", 0.1, [0, 0])]
    (group,) = rows(samples, 3, source="reevaluated", first_uid=7)
    assert group.mean == Fraction(11, 30)
    assert group.row("solved") == {
        "uid": 7,
        "prompt": Prompt("p", "label").id,
        "source": "reevaluated",
        "state": "solved",
        "mean": 11 / 30,
        "responses": 3,
        "tokens": 4,
    }
    (group,) = rows([sample("p", None, [1])], 1)
    assert (group.row("failed")["mean"], group.row("failed")["tokens"]) == (None, 1)


def test_images_make_another_prompt():
    one, two = rows([sample("p", 0.0, [1], images=["a.png"]), sample("p", 0.0, [1], images=["b.png"])], 1)
    assert one.prompt.id == Prompt("p", "label", ["a.png"]).id != two.prompt.id


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

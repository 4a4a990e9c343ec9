"""What the model wrote is what the reward sees, whatever the tokenizer, or a cut, makes of the prompt."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.training.engine.response_text import texts
from bapo_openrlhf.training.engine.reward_worker import call, names_responses

any_text = st.text(st.characters(exclude_categories=("Cs",)))  # UTF-8 has no surrogates


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", clean_up_tokenization_spaces=False)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@given(prompt=any_text, response=any_text, cut=st.integers(0, 9))
def test_the_text_is_what_the_model_wrote(tokenizer, prompt, response, cut):
    """It depends only on the tokens of the response, also if the prompt was cut."""
    query, text = texts(tokenizer, ids(tokenizer, prompt)[cut:], [*ids(tokenizer, response), 0])
    assert text == f"{response}</s>"
    assert query.endswith(text)


def test_a_blank_at_the_beginning_of_a_response_stays():
    """Such a tokenizer makes "4" if it decodes only the response, and the model wrote " 4" after the prompt."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"▁is": 0, "▁4": 1, "?": 2}, unk_token="?"))
    made.decoder = decoders.Metaspace()
    assert texts(PreTrainedTokenizerFast(tokenizer_object=made), [0], [1]) == ("is 4", " 4")


def test_a_response_that_changes_the_end_of_the_prompt_has_its_own_text(tokenizer):
    """The prompt ends within a letter, and the response begins with the rest of it."""
    tokens = ids(tokenizer, "éx")
    assert texts(tokenizer, tokens[:1], tokens[1:]) == ("éx", "\ufffdx")


def named(queries, prompts, labels, responses):
    return responses


@pytest.mark.parametrize(("function", "returned", "names"), [
    (named, ["r"], True),
    (lambda queries, prompts, labels: 0, 0, False),
    (lambda queries, prompts, labels, **keywords: keywords["responses"], ["r"], False),
    (lambda queries, prompts, labels, *responses: len(responses), 0, False),
    (functools.wraps(named)(lambda queries, prompts, labels: "wrapped"), "wrapped", True),
    (max, ["q"], False),
])  # fmt: skip
def test_a_function_gets_responses_if_it_takes_them(function, returned, names):
    assert call(function, ["q"], ["p"], ["l"], ["r"]) == returned
    assert names_responses(function) is names

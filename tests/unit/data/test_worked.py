"""What a chat template makes of a prompt and its worked solution or response."""

import pytest

from bapo_openrlhf.data.prompts import header_of, wrong_response

END, HEADER = "<|end|>", "<|assistant|>\n"


def template(opens):
    """A chat template's function. It may open thinking."""

    def apply(messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        text = "".join(f"<|{message['role']}|>\n{message['content']}{END}\n" for message in messages)
        return text + (HEADER + ("<think>\n" if opens else "") if add_generation_prompt else "")

    return apply


@pytest.mark.parametrize(("prompt", "response", "wrong"), [
    (f"1 + 1?{END}\n{HEADER}", "<think>\none and one\n</think>\nIt is 2.", None),
    (f"1 + 1?{END}\n{HEADER}<think>\n", "one and one\n</think>\nIt is 2.", None),
    (f"1 + 1?{END}\n{HEADER}<think>\n", "<think>\none and one\n</think>\nIt is 2.", "<think>"),
    (f"1 + 1?{END}\n{HEADER}", "<think>\n<think>\none\n</think>\nIt is 2.", "<think>"),
    (f"Write <think> first: 1 + 1?{END}\n{HEADER}", "<think>\none\n</think>\nIt is 2.", None),
    (f"1 + 1?{END}\n{HEADER}", f"It is 2.{END}\n", None),
    (f"1 + 1?{END}\n{HEADER}", f"It is 2.{END}{END}", END),
    (f"1 + 1?{END}\n{HEADER}", f"{HEADER}It is 2.", HEADER.strip()),
])  # fmt: skip
def test_each_part_is_there_once(prompt, response, wrong):
    found = wrong_response(prompt, response, end=END, header=HEADER)
    assert found is None if wrong is None else wrong in found


def test_the_header_is_what_stands_before_a_response():
    assert header_of("1 + 1?", template(opens=False)) == HEADER
    assert header_of([{"role": "user", "content": "x"}], template(opens=True)) == HEADER + "<think>\n"

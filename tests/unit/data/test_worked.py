"""What a chat template makes of a prompt and its worked solution or response."""

from __future__ import annotations

import pytest

from bapo_openrlhf.data.prompts import header_of, wrong_response

END, HEADER = "<|end|>", "<|assistant|>\n"


def template(*, opens: bool = False, cuts: bool = False, leaves_out: bool = False):
    """A chat template's function: it may open thinking, and cut it or leave out its beginning in finished turns."""

    def apply(messages, *, tokenize, add_generation_prompt=False):
        assert not tokenize
        text = ""
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant":
                content = content.rpartition("</think>")[2].lstrip() if cuts else content
                content = content.replace("<think>", "") if leaves_out else content
                text += f"{HEADER}{content}{END}\n"
            else:
                text += f"<|{message['role']}|>\n{content}{END}\n"
        return text + (HEADER + ("<think>\n" if opens else "") if add_generation_prompt else "")

    return apply


@pytest.mark.parametrize(
    ("prompt", "response", "wrong"),
    [
        (f"1 + 1?{END}\n{HEADER}", "<think>\none and one\n</think>\nIt is 2.", None),
        (f"1 + 1?{END}\n{HEADER}<think>\n", "one and one\n</think>\nIt is 2.", None),
        (f"1 + 1?{END}\n{HEADER}<think>\n", "<think>\none and one\n</think>\nIt is 2.", "<think>"),
        (f"1 + 1?{END}\n{HEADER}", "<think>\n<think>\none\n</think>\nIt is 2.", "<think>"),
        (f"Write <think> first: 1 + 1?{END}\n{HEADER}", "<think>\none\n</think>\nIt is 2.", None),
        (f"1 + 1?{END}\n{HEADER}", f"It is 2.{END}\n", None),
        (f"1 + 1?{END}\n{HEADER}", f"It is 2.{END}{END}", END),
        (f"1 + 1?{END}\n{HEADER}", f"{HEADER}It is 2.", HEADER.strip()),
    ],
)
def test_each_part_is_there_once(prompt, response, wrong):
    found = wrong_response(prompt, response, end=END, header=HEADER)
    assert found is None if wrong is None else wrong in found


def test_the_header_is_what_stands_before_a_response():
    assert header_of("1 + 1?", template()) == HEADER
    assert header_of([{"role": "user", "content": "x"}], template(opens=True)) == HEADER + "<think>\n"

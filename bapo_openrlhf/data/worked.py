"""What a model would learn from a worked solution, as a chat template makes it.

The text must begin with the prompt that a run gives, and have the beginning of thinking, the end token and the header
of a response once each. A template that opens thinking gives a second `<think>` to a solution that has one, and a
template that cuts thinking moves the text, so that a model learns its last words without a beginning.
"""

from collections.abc import Callable
from typing import Any

THINK = "<think>"


def wrong_response(prompt: str, response: str, *, end: str = "", header: str = "") -> str | None:
    """What there is once too often in a response that follows a prompt; None if there is nothing.

    `end` is the tokenizer's end token, and `header` is what the chat template writes before each response.
    """
    opened = prompt.rstrip().endswith(THINK)
    if response.count(THINK) + opened > 1:
        return f"{THINK} twice" + (", because the prompt ends with one" if opened else "")
    if end and end in response.rstrip().removesuffix(end):
        return f"the end token {end} before its end"
    name = header.replace(THINK, "").strip()
    return f"the header of a response, {name!r}" if name and name in response else None


def header_of(content: Any, apply: Callable[..., str]) -> str:
    """What a chat template writes before a response to a prompt; "" if it writes nothing, or not at the end."""
    asked = [{"role": "user", "content": content}] if isinstance(content, str) else content
    without, prompt = (apply(asked, tokenize=False, add_generation_prompt=add) for add in (False, True))
    return prompt[len(without) :] if prompt.startswith(without) else ""

"""The text of a response, from its tokens.

A prompt cannot be cut out of the text of prompt and response, because it may not be there as it was: a tokenizer may
change it, its first tokens may be cut, and an image has many tokens in the place of one placeholder.
"""

from collections.abc import Sequence
from typing import Any


def texts(tokenizer: Any, prompt: Sequence[int], response: Sequence[int]) -> tuple[str, str]:
    """The text of prompt and response together, and of the response, both with special tokens.

    The latter is what the response adds to the text of the prompt. If it changes the end of that, as a tokenizer does
    that moves blanks, it is the text of the response's own tokens.
    """
    query, prompt_text = (
        tokenizer.decode(tokens, skip_special_tokens=False) for tokens in ([*prompt, *response], list(prompt))
    )
    if query.startswith(prompt_text):
        return query, query[len(prompt_text) :]
    return query, tokenizer.decode(list(response), skip_special_tokens=False)

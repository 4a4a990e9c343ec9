r"""Whether a label reads as an answer: mathematics, a choice, or a word or two.

A published label may be "proof" or "notfound", or the whole worked solution. No response equals it, so each right
answer would get the reward 0.
"""

import re

from bapo_openrlhf.tasks.choices import choice
from bapo_openrlhf.tasks.notation import is_text, parts

_GROUP = re.compile(r"\\(?:text\w*|math\w+|mbox|operatorname\*?|begin|end) ?\{[^{}]*\}|_\{[^{}]*\}|\\[a-zA-Z]+")
_FOREIGN = re.compile(r"[\"`#<>]{2}|[\"`#]|\n")
_WORD = re.compile(r"[a-zA-Z]{4,}")
_FUNCTIONS = frozenset(
    (*("sqrt", "frac", "asin", "acos", "atan", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan"),
     *("floor", "ceil", "true", "false", "even", "infty", "infinity"))
)  # fmt: skip


def is_mathematics(label: str) -> bool:
    r"""Whether a label reads as mathematics or a choice. Words count as such only within \text{}."""
    if choice(label) or is_text(label):
        return True
    bare = _GROUP.sub(" ", parts(label)[0])
    words = (word for word in _WORD.findall(bare) if not word.isupper())
    return not _FOREIGN.search(label) and all(word.casefold() in _FUNCTIONS for word in words)


def is_answer(label: str) -> bool:
    """Whether a label reads as mathematics, or is at most three words."""
    return is_mathematics(label) or bool(re.fullmatch(r"[^\W\d_]+(?:[ '-][^\W\d_]+){0,2}", label))

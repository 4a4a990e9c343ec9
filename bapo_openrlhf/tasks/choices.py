r"""Letters of multiple choice: an answer may have the letter, its text, or both, as \textbf{(C)} 12 does."""

import re
from typing import NamedTuple

from bapo_openrlhf.tasks.notation import plain

_STYLED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boldsymbol) ?\{([^{}]*)\}")
_BLANK = re.compile(r"(?:(?<!\\)\\[,;: ]|\\quad(?![a-zA-Z])|~|\$|\s)+")
_FIRST = re.compile(r"(?:(?:Option|Choice) )?(?:\(([A-F])\)|([A-F])\)|([A-F])(?:[.:](?= )|\Z)) ?(.*)", re.DOTALL)
_OTHER = re.compile(r"(?<![a-zA-Z\\])[A-F](?![a-zA-Z])")
_SEVERAL = re.compile(r"\(?[A-F]\)?(?:(?:, ?|,? and |; ?)\(?[A-F]\)?)+")


class Choice(NamedTuple):
    """A letter, and the text of its choice, which may be empty."""

    letter: str
    text: str
    bracketed: bool


def choice(text: str) -> Choice | None:
    r"""The choice with which an answer begins. None: it begins with none, or names several."""
    text = _without_styles(text)
    first = _FIRST.fullmatch(text)
    if first is None or _OTHER.search(first[4]):
        return None
    letter = first[1] or first[2] or first[3]
    return Choice(letter, first[4], bool(first[1] or first[2]))


def letters(text: str) -> list[str] | None:
    """The letters of several choices in order, from A, C or A and C. None: these are no several letters."""
    text = _without_styles(text)
    return sorted(re.findall("[A-F]", text)) if _SEVERAL.fullmatch(text) else None


def same_choice(answer: str, label: str) -> bool | None:
    """Whether answer and label are the same choice. None: the label is none, so the answers themselves decide.

    A letter in a bracket with a text is the letter or the text, and an answer with both must have both right.
    """
    ours, theirs = choice(answer), choice(label)
    if letters(answer) or letters(label):
        both = [letters(text) or [*plain(text)] for text in (answer, label)]
        return both[0] == both[1] if all("".join(one).isalpha() for one in both) else None
    if ours is None or theirs is None or (theirs.text and not theirs.bracketed):
        return None
    if ours.letter != theirs.letter or not (ours.text and theirs.text):
        return ours.letter == theirs.letter
    return None


def content(text: str) -> str:
    """The text of a choice without its letter, and any other text as it is."""
    first = choice(text)
    return first.text if first and first.bracketed and first.text else text


def _without_styles(text: str) -> str:
    return _BLANK.sub(" ", _STYLED.sub(r"\1", plain(_BLANK.sub(" ", text)))).strip()

r"""Letters keep their case: R and r are two variables, but math-verify's reader writes every letter small.

So a capital letter that also occurs as a small one gets the name of another letter, in answer and label alike.
"""

import re
from collections.abc import Mapping

_NAME = re.compile(r"\\(?:begin|end|mathbb|mathcal|operatorname) ?\{[^{}]*\}|\\([a-zA-Z]+)|([a-zA-Z])")
_FREE = "uvwqzkhmnpstyxjlrcba"  # Not e and i, which are numbers, and not d, f, g and o.


def told_apart(value: str, reference: str) -> tuple[str, str] | None:
    """Answer and label without two letters that differ only by case. None: there are too few letters."""
    names = {name[1] or name[2] for text in (value, reference) for name in _NAME.finditer(text)} - {None}
    small = {name for name in names if name[0].islower()}
    capital = sorted(name for name in names if name[0].isupper() and name[0].lower() + name[1:] in small)
    free = [letter for letter in _FREE if not {letter, letter.upper()} & names]
    if len(free) < len(capital):
        return None
    new = dict(zip(capital, free, strict=False))
    return _renamed(value, new), _renamed(reference, new)


def _renamed(text: str, new: Mapping[str, str]) -> str:
    def name(match: re.Match[str]) -> str:
        old = match[1] or match[2]
        return new.get(old, match[0]) + (" " if match[1] in new else "")

    return _NAME.sub(name, text)

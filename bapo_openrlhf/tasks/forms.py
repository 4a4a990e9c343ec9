r"""Whether an answer has a form that can be right, before mathematics compares it with the label.

math-verify is a lenient reader: it takes HTMA for a product of four letters, 2024-12-25 for a difference, and 42=43 for
its last number. It also evaluates what it reads. So it finds wrong answers equal to labels, and a policy learns to
write them. Each function here is one rule and says why. All texts are in the notation of `notation.parts`, but a choice
is read as it was written.
"""

import math
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from bapo_openrlhf.tasks.notation import BLANK, plain

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_SUBSCRIPT = re.compile(r"_(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\?[a-zA-Z0-9])")


def is_refused(value: str, reference: str) -> bool:
    """Whether the form of an answer says that it does not equal the label, or that it must not be evaluated."""
    rules = (is_other_bracket, is_other_ratio, is_unfinished, is_large)
    return any(rule(value, reference) for rule in rules)


def has_letters(text: str) -> bool:
    """Whether there are letters outside of LaTeX's commands."""
    return bool(re.search("[a-zA-Z]", _COMMAND.sub("", text)))


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that are in no brackets."""
    parts, start, depth = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth <= 0 and text.startswith(separator, at):
            parts.append(text[start:at])
            start = at + len(separator)
    return [part.strip(" ") for part in (*parts, text[start:])]


# ---------------------------------------------------------------------------------------------------- multiple choice

_STYLED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boldsymbol) ?\{([^{}]*)\}")
_FIRST = re.compile(r"(?:(?:Option|Choice) )?(?:\(([A-F])\)|([A-F])\)|([A-F])(?:[.:](?= )|\Z)) ?(.*)", re.DOTALL)
_OTHER = re.compile(r"(?<![a-zA-Z\\])[A-F](?![a-zA-Z])")
_SEVERAL = re.compile(r"\(?[A-F]\)?(?:(?:, ?|,? and |; ?)\(?[A-F]\)?)+")


class Choice(NamedTuple):
    r"""A letter, and the text of its choice, which may be empty. \textbf{(C)} 12 has both."""

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


def choice_text(text: str) -> str:
    """The text of a choice without its letter, and any other text as it is."""
    first = choice(text)
    return first.text if first and first.bracketed and first.text else text


def _without_styles(text: str) -> str:
    return BLANK.sub(" ", _STYLED.sub(r"\1", plain(BLANK.sub(" ", text)))).strip()


# ---------------------------------------------------------------------------------------------------- words and units

_LETTER = re.compile(r"\(?([a-zA-Z])\)?")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ '-])+")
_SHORT = frozenset(["yes", "no", "odd", "all", "one", "two", "six", "ten"])  # Other short letters may be a product.
_ARTICLE = re.compile(r"\A(?:a|an|the) ", re.IGNORECASE)


def same_words(value: str, reference: str, text: bool) -> bool | None:
    """Whether two words, or two letters, are the same. None: they are neither, so mathematics decides.

    Letters in another order are another word or another order of points, although their product is the same. Case
    counts in letters and in the names of points, such as AB. An article does not count. With `text`, one of the two is
    written as a text. Otherwise up to three letters such as ab are a product.
    """
    letter, other = _LETTER.fullmatch(value), _LETTER.fullmatch(reference)
    if letter and other:
        return letter[1] == other[1]
    if not (_is_word(value, text) or _is_word(reference, text)):
        return None
    a, b = (_ARTICLE.sub("", word) for word in (value, reference))
    return a == b or (a.casefold() == b.casefold() and not (len(a) < 4 and a.isupper() != b.isupper()))


def _is_word(letters: str, text: bool) -> bool:
    is_no_product = text or len(letters) > 3 or letters.isupper() or letters.casefold() in _SHORT
    return is_no_product and bool(_WORDS.fullmatch(letters))


def is_changed(unit: str, measure: str, reference: str) -> bool:
    r"""Whether a unit that only the answer has makes another number of it: 13_8 for 13 (not 13_{10}), 0.5\% for 0.5.

    50\% for 50 is right, because a question can ask for a percentage. A label below 1 is a share and no percentage.
    """
    share = "/" in reference or "frac" in reference or reference.lstrip("+-0").startswith(".")
    has_base = any(word.isdigit() and word != "10" for word in unit.split())
    return not measure and (has_base or (unit == "percent" and share))


# ------------------------------------------------------------------------------------------------------------- shapes


def is_other_bracket(value: str, reference: str) -> bool:
    """Sets have no order and tuples have one, and a determinant is no matrix: each equals only its own kind."""
    kinds = {_kind(split(text, "=")[-1]) for text in (value, reference)}
    return kinds in ({"set", "tuple"}, {"determinant", "matrix"})


def is_other_ratio(value: str, reference: str) -> bool:
    """A ratio of three numbers or more is no quotient, so it equals only a ratio of as many."""
    colons = value.count(":"), reference.count(":")
    return max(colons) > 1 and colons[0] != colons[1]


def is_other_time(value: str, reference: str, unit: str) -> bool:
    """A time is no quotient, so 1:15 is not 2:30. A label counts as one if a ratio would not be written like it."""
    if not re.fullmatch("[0-9]+(?::[0-9]+)+", reference):
        return False
    parts = reference.split(":")
    padded = any(len(part) > 1 and part.startswith("0") for part in parts)
    is_time = unit in ("am", "pm") or padded or math.gcd(*map(int, parts)) > 1
    return is_time and value.lstrip("0") != reference.lstrip("0")


def _kind(text: str) -> str:
    if "\\begin{" in text:
        return "determinant" if "{vmatrix}" in text or "\\det" in text else "matrix"
    if re.fullmatch(r"\\\{.*\\\}", text) and "\\{" not in text[2:]:
        return "set"
    whole = re.fullmatch(r"\(.*\)", text) and len(split(text, ",")) == 1
    return "tuple" if whole and len(split(text[1:-1], ",")) > 1 else "other"


_VECTOR = re.compile(r"\(?\\begin\{([pb]?matrix|array)\}(?:\{[lcr]+\})?(.*)\\end\{\1\}\)?", re.DOTALL)
_TRANSPOSED = re.compile(r"(\(.*\)) ?\^(?:T|\\top|\{(?:T|\\top)\})")
_RATIO = re.compile(r"([0-9]+):([0-9]+)")


def same_shape(value: str, reference: str) -> tuple[str, str]:
    """Answer and label, in one shape if one is a vector in rows and the other a tuple, or a ratio and a fraction."""
    pair = [_TRANSPOSED.sub(r"\1", text) if _TRANSPOSED.fullmatch(text) else text for text in (value, reference)]
    if {_kind(text) for text in pair} == {"matrix", "tuple"}:
        pair = [_as_tuple(text) or text for text in pair]
    if re.search("/|frac", pair[1]) and _NUMBER.fullmatch(pair[1]) and (ratio := _RATIO.fullmatch(pair[0])):
        pair[0] = rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}"
    return pair[0], pair[1]


def _as_tuple(text: str) -> str | None:
    matrix = _VECTOR.fullmatch(text)
    rows = [row.strip() for row in matrix[2].strip().removesuffix("\\\\").split("\\\\")] if matrix else []
    cells = [cell.strip() for cell in rows[0].split("&")] if len(rows) == 1 else rows
    whole = len(cells) > 1 and all(cell and "&" not in cell for cell in cells)
    return f"({', '.join(cells)})" if whole else None


# ---------------------------------------------------------------------------------------------------------- equations

# That of f(x), of f^{-1}(x) and of E[X].
_ARGUMENT = re.compile(r"(?<=[a-zA-Z'}])(?:(?:\^\{-1\})?\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\])")
_ATOM = re.compile(
    r"[\[|]?(?:\\[a-zA-Z]+ ?)*(?:(?:[A-Z]+|[a-z])'*|\{[a-zA-Z ]+\})[\]|]?"
    r"|(?:m ?)?\\(?:measured)?angle ?(?:[a-zA-Z]+|[0-9]+)"
)
_INDEXED = re.compile(rf"[a-zA-Z]{_SUBSCRIPT.pattern}")
_LATIN = re.compile(r"[a-zA-Z](?:_.*)?")
_CALCULATED = re.compile(r"[0-9^!]|\\(?:sqrt|sum|prod|int|lim|ln|log|exp|times|cdot|div|binom)(?![a-zA-Z])|\A-")


def sides(value: str, reference: str, same: Callable[[str, str], bool]) -> tuple[str, str] | None:
    r"""Answer and label without the name of what they give, such as x in x = 5. None: an equation is false.

    What stands before the last "=" must be a name, or equal the label as 6 \times 7 does in 6 \times 7 = 42. An answer
    such as 42 = 43 gives two numbers, and 2x = 5 does not give x.
    """
    if (names := _values_by_name(reference)) is not None:
        return _in_order(value, names)
    label = split(reference, "=")
    if len(label) == 2 and "=" not in value and not label[0].endswith(("<", ">", "!")):
        left = split(label[0][1:-1], ",") if _kind(label[0]) == "tuple" else label[:1]
        return None if any(map(_is_curve, left)) else (value, label[1])
    if len(label) > 1:
        return None if any(len(split(part, "=")) > 2 for part in split(value, ",")) else (value, reference)
    named = _values_by_name(value)
    if named is not None and _kind(reference) == "tuple" and not _are_ordered(named):
        return None
    several = split(_exact(value), ",")
    values = [_last_side(part, lambda side: len(several) == 1 and same(side, reference)) for part in several]
    return None if None in values else (", ".join(filter(None, values)), reference)


def _values_by_name(text: str) -> dict[str, str] | None:
    """The values of m = 2, n = 3, or (m, n) = (2, 3), by their names. None: these are not several different names."""
    pairs = [split(part, "=") for part in split(text, ",")]
    if len(pairs) == 1 and len(pairs[0]) == 2 and {_kind(side) for side in pairs[0]} == {"tuple"}:
        names, values_in_order = (split(side[1:-1], ",") for side in pairs[0])
        if len(names) != len(values_in_order):
            return None
        pairs = [list(pair) for pair in zip(names, values_in_order, strict=True)]
    if len(pairs) < 2 or not all(len(pair) == 2 and _is_name(pair[0]) for pair in pairs):
        return None
    values = dict(pairs)
    return values if len(values) == len(pairs) else None


def _in_order(value: str, by_name: dict[str, str]) -> tuple[str, str] | None:
    label = f"({', '.join(by_name.values())})"
    if (values := _values_by_name(value)) is not None:
        return (f"({', '.join(values[name] for name in by_name)})", label) if values.keys() == by_name.keys() else None
    if "=" in value:
        return None
    return (value if _kind(value) == "tuple" else f"({value})"), label


def _are_ordered(names: Iterable[str]) -> bool:
    """Whether names can be those of a tuple's values in order.

    Only neighbours in the Latin alphabet, such as x and y, or x_1 and x_2, have an order that everybody knows.
    """
    latin = [name for name in names if _LATIN.fullmatch(name)]
    letters = sorted({name[0].casefold() for name in latin})
    if any(ord(after) - ord(before) > 1 for before, after in pairwise(letters)):
        return True
    return latin == sorted(latin, key=lambda name: (name[0].casefold(), len(name), name.casefold()))


def _last_side(text: str, same: Callable[[str], bool]) -> str | None:
    *before, last = split(text, "=")
    if len(before) == 1 and _is_name(last) and not _is_name(before[0]):
        before, last = [last], before[0]  # 5 = x
    return last if all(_is_name(side) or same(side) for side in before) else None


def _is_curve(left: str) -> bool:
    """Whether the left side of an equation is an expression in x, y or z: AB + CD = 5 gives 5, and x + y = 5 does not.

    A letter with an index, and d before a letter as in dy/dx, are none of these.
    """
    if _ATOM.fullmatch(_without_arguments(left)):
        return False
    bare = _COMMAND.sub(" ", _INDEXED.sub("", _ARGUMENT.sub("", left)))
    return any(set(letters) <= set("xyz") for letters in re.findall("[a-zA-Z]+", bare))


def _is_name(text: str) -> bool:
    """Whether a text names a quantity, such as x_1, f(2), AB, P(A), or a + b. A number in it makes it a calculation."""
    bare = _without_arguments(text)
    return bool(re.search("[a-zA-Z]", bare)) and not _CALCULATED.search(bare)


def _without_arguments(text: str) -> str:
    return _ARGUMENT.sub("", _SUBSCRIPT.sub("", text))


def _exact(value: str) -> str:
    r"""The exact value of 1/3 \approx 0.33, and the rounded one of x \approx 0.33."""
    exact, *rounded = split(value, "\\approx")
    return f"{exact}={rounded[-1]}" if rounded and "=" not in exact and _is_name(exact) else exact


# ------------------------------------------------------------------------------------------------------- calculations

_DIGITS = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_PART = r"(?:\{-?[0-9]+\}|[0-9])"
_ONE = rf"[+-]?(?:{_DIGITS}? ?\\frac ?{_PART} ?{_PART}|{_DIGITS}(?:/[0-9]+)?)"
_NUMBER = re.compile(_ONE)
_FINISHED = re.compile(rf"(?:\\[{{}}]|[\[\]() ,]|(?<![0-9}}]){_ONE})+")
_POWER_OF_TEN = re.compile(r"(?<=[0-9.]) ?(?:\*|\\(?:times|cdot)) ?10\^(?:\{[+-]?[0-9]+\}|[0-9])")
_OPERATION = re.compile(
    r"(?<=[\w})\]!]) ?(?:[-+*]|\\(?:times|cdot|div|pm|mp|ast)(?![a-zA-Z]))|!"
    r"|\\(?:[dt]?binom|choose|sum|prod|int|lim|gcd|lcm|min|max|operatorname)(?![a-zA-Z])"
)
_CONSTANT = re.compile(
    r"(?:[-+0-9./^(){}\[\] _ei]|\\[{}]"
    r"|\\(?:frac|sqrt|pi|ln|log|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|[lr](?:floor|ceil))(?![a-zA-Z]))+"
)


def is_decimal(text: str) -> bool:
    """Whether a text is a number in digits, with or without a decimal point."""
    return bool(re.fullmatch(rf"[+-]?{_DIGITS}", text))


def is_unfinished(value: str, reference: str) -> bool:
    r"""A label without a calculation wants an answer without one, because the question can be that calculation.

    Calculations are + - × ÷ between numbers, factorials, binomials, sums, products, integrals and limits. Roots, powers
    and values of functions are not: \sqrt{16} and \sin 30^\circ are names of numbers. If the label is one number, a
    variable or a sign that numbers do not have, as in 5 \to 6, is refused as well.
    """
    text, label = (_POWER_OF_TEN.sub("", text) for text in (value, reference))
    if not _FINISHED.fullmatch(label):
        return False
    return bool(_OPERATION.search(text)) or bool(_NUMBER.fullmatch(label) and not _CONSTANT.fullmatch(text))


# --------------------------------------------------------------------------------------------------------------- size

MAX_FACTORIAL = 3000  # It has 9131 digits.
MAX_POWER = 10_000  # The exponent, times the digits of the base.

_FACTORIAL = re.compile(r"([0-9]+)!")
_POWER = re.compile(r"([0-9]*)[)}]?\^(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|(.))")
_NESTED = re.compile(r"[)}!]!|\^[^()]*\)\^")  # A factorial of a calculation, or a power of a power.


def is_large(value: str, reference: str) -> bool:
    """Numbers with more than about 10,000 digits are not evaluated. Such an answer is right if written as the label."""
    return value != reference and (_has_large_number(value) or _has_large_number(reference))


def _has_large_number(text: str) -> bool:
    return (
        any(_above(number, MAX_FACTORIAL) for number in _FACTORIAL.findall(text))
        or ("binom" in text and any(_above(number, MAX_FACTORIAL) for number in re.findall("[0-9]+", text)))
        or bool(_NESTED.search(text) and not has_letters(text))
        or any(_is_large_power(base, braced or single) for base, braced, single in _POWER.findall(text))
    )


def _is_large_power(base: str, exponent: str) -> bool:
    """Whether a power is large or a tower. An exponent with a variable is not evaluated, so it is neither."""
    if has_letters(exponent):
        return False
    numbers = re.findall("[0-9]+", exponent)
    return (
        "^" in exponent or "!" in exponent or any(_above(number, MAX_POWER // max(1, len(base))) for number in numbers)
    )


def _above(digits: str, limit: int) -> bool:
    return len(digits) > 9 or int(digits) > limit

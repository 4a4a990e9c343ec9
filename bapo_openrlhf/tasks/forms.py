r"""Whether an answer has a form that could be right, before mathematics compares it with the label.

math-verify is a lenient reader: it takes HTMA for a product of four letters, 2024-12-25 for a difference, 42=43 for its
last number, and it evaluates what it reads. So it finds wrong answers equal to labels, and a policy learns to write
them. Each function here states one rule and why there is one. All texts are in the notation of `notation.parts`.
"""

import re
from collections.abc import Callable

MAX_FACTORIAL = 3000  # It has 9131 digits.
MAX_POWER = 10_000  # Digits of a power, and its exponent.

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_OPEN, _CLOSE = "([{", ")]}"


def refused(value: str, reference: str) -> bool:
    """Whether the form of an answer says that it does not equal the label, or that it must not be compared."""
    rules: tuple[Callable[[str, str], bool], ...] = (_ratio, _brackets, _relation, _text, _unfinished, is_large)
    return any(rule(value, reference) for rule in rules)


# -------------------------------------------------------------------------------------------------------------- words

_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ '-])+")
_SHORT = frozenset(("yes", "no", "odd"))
_CHOICE = re.compile(r"\(?([a-zA-Z])\)?")


def same_words(value: str, reference: str) -> bool | None:
    """Whether two words, or two letters, are the same. None: the label is neither, so mathematics decides.

    Letters in another order are another word or another order of points, although their product is the same. Case
    counts in letters and in short words, such as the points AB, and an article does not count.
    """
    letter, other = _CHOICE.fullmatch(value), _CHOICE.fullmatch(reference)
    if letter and other:
        return letter[1] == other[1]
    if not (_is_word(value) or _is_word(reference)):
        return None
    a, b = (re.sub(r"\A(?:a|an|the) ", "", text, flags=re.IGNORECASE) for text in (value, reference))
    return a == b or (a.casefold() == b.casefold() and (len(a) > 3 or a.casefold() in _SHORT))


def _is_word(text: str) -> bool:
    return bool(_WORDS.fullmatch(text)) and (
        len(text) > 3 or text.isupper() or " " in text or text.casefold() in _SHORT
    )


def _text(value: str, reference: str) -> bool:
    r"""Text beside a value is refused, because it can take back what the value says: 42\text{ (or 43)}."""
    return value != reference and bool(re.search(r"\\(?:text|textbf|textit|mbox) ?\{", _SUBSCRIPT.sub("", value)))


# ------------------------------------------------------------------------------------------------------------- shapes


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that are in no brackets."""
    found, start, depth, at = [], 0, 0, 0
    while at < len(text):
        if text[at] in _OPEN:
            depth += 1
        elif text[at] in _CLOSE:
            depth -= 1
        elif depth <= 0 and text.startswith(separator, at):
            found.append(text[start:at])
            start = at + len(separator)
        at += 1
    return [part.strip(" ") for part in (*found, text[start:])]


def _brackets(value: str, reference: str) -> bool:
    r"""Sets have no order and tuples have one, and a determinant is a number: each equals only its own kind."""
    kinds = [_kind(split(text, "=")[-1]) for text in (value, reference)]
    return set(kinds) in ({"set", "tuple"}, {"determinant", "matrix"}, {"set", "empty"}, {"number", "empty"})


def _kind(text: str) -> str:
    if "{vmatrix}" in text or "\\det" in text:
        return "determinant"
    if "\\begin{" in text:
        return "matrix"
    if text in ("\\emptyset", "\\{\\}"):
        return "empty"
    if re.fullmatch(r"\\\{.*\\\}", text) and "\\{" not in text[2:]:
        return "set"
    if re.fullmatch(r"\(.*\)", text) and len(split(text[1:-1], ",")) > 1:
        return "tuple"
    return "number" if _NUMBERS.fullmatch(text) else "other"


def _ratio(value: str, reference: str) -> bool:
    """A colon is refused if the label has none, because it may be a score or a time."""
    return ":" in value and ":" not in reference


_RELATION = re.compile(r"\\(?:neq?|not|sim|cong|equiv)(?![a-zA-Z])|[<>]|\\(?:[lg]eq?|[lg]t|[lg]eqslant)(?![a-zA-Z])")


def _relation(value: str, reference: str) -> bool:
    """A relation is no number: x > 5 does not say that x is 5."""
    return _is_number(reference) and bool(_RELATION.search(value))


# ---------------------------------------------------------------------------------------------------------- equations

_SUBSCRIPT = re.compile(r"_(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\?[a-zA-Z0-9])")
_ARGUMENT = re.compile(r"(?<=[a-zA-Z'])\((?:[^()]|\([^()]*\))*\)")
_ATOM = re.compile(r"(?:\\[a-zA-Z]+ ?)*(?:[a-zA-Z]'*|\{[a-zA-Z ]+\})")
_NO_NAME = re.compile(r"[0-9^!]|\\(?:sqrt|sum|prod|int|lim|ln|log|exp|times|cdot|div|binom)(?![a-zA-Z])|\A-")


def _is_name(text: str) -> bool:
    """Whether a text names a quantity, such as x_1, f(2), AB, P(A), or a + b. A number in it makes it a calculation."""
    bare = _ARGUMENT.sub("", _SUBSCRIPT.sub("", text))
    return bool(re.search("[a-zA-Z]", _COMMAND.sub("x", bare))) and not _NO_NAME.search(bare)


def solved(value: str, reference: str, same: Callable[[str, str], bool]) -> tuple[str, str] | None:
    r"""Answer and label without the name of what they give, such as x in x = 5. None: an equation is false.

    What stands before the last "=" must be a name, or equal the label as 6 \times 7 does in 6 \times 7 = 42. An answer
    such as 42 = 43 gives two numbers, and 2x = 5 gives none for x.

    Args:
        same: Whether an expression equals the label.
    """
    label = split(reference, "=")
    if len(label) == 2 and _ATOM.fullmatch(_ARGUMENT.sub("", _SUBSCRIPT.sub("", label[0]))) and "=" not in value:
        return value, label[1]
    if len(label) > 1:
        return None if any(len(split(part, "=")) > 2 for part in split(value, ",")) else (value, reference)
    value = _exact(value)
    several = split(value, ",")
    stripped = []
    for part in several:
        *before, last = split(part, "=")
        if len(before) == 1 and _is_name(last) and not _is_name(before[0]):
            before, last = [last], before[0]  # 5 = x
        if before and not _is_name(before[0]):
            before = ["", *before[1:]] if len(several) == 1 and same(before[0], reference) else before
        names = [side for side in before if side and not _is_name(side)]
        if names and not (len(several) == 1 and all(same(side, reference) for side in names)):
            return None
        stripped.append(last)
    return ", ".join(re.sub(r"\A[a-zA-Z] ?\\in(?![a-zA-Z]) ?(?=\\\{)", "", part) for part in stripped), reference


def _exact(value: str) -> str:
    r"""The exact value of 1/3 \approx 0.33, and the rounded one of x \approx 0.33."""
    exact, *rounded = split(value, "\\approx")
    if not rounded:
        return value
    return f"{exact}={rounded[-1]}" if _is_name(exact) and "=" not in exact else exact


# ------------------------------------------------------------------------------------------------------- calculations

_DIGITS = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_SCIENTIFIC = re.compile(r"(?<=[0-9.]) ?\\(?:times|cdot) ?10\^(?:\{[+-]?[0-9]+\}|[0-9])")
_ONE = rf"[+-]?(?:{_DIGITS}? ?(?:\\frac ?(?:\{{-?[0-9]+\}}|[0-9]) ?(?:\{{[0-9]+\}}|[0-9])|{_DIGITS}(?:/[0-9]+)?))"
_NUMBERS = re.compile(_ONE)
_FINISHED = re.compile(rf"(?:\\[{{}}]|[\[\]() ,]|(?<![0-9}}]){_ONE})+")
_CONSTANT = re.compile(
    r"(?:[-+0-9./^(){}\[\] _ei]|\\[{}]|\\(?:frac|sqrt|pi|ln|log|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|[lr](?:floor|ceil))"
    r"(?![a-zA-Z]))+"
)
_OPERATION = re.compile(
    r"(?<=[\w})\]!]) ?(?:[-+*]|\\(?:times|cdot|div|pm|mp|ast)(?![a-zA-Z]))|!"
    r"|\\(?:[dt]?binom|choose|sum|prod|int|lim|gcd|lcm|min|max|operatorname)(?![a-zA-Z])"
)


def is_finished(text: str) -> bool:
    """Whether a text has only numbers with nothing left to compute, such as 42, -3/4, 1.6e-19, or (1, 2)."""
    return bool(_FINISHED.fullmatch(_SCIENTIFIC.sub("", text)))


def _unfinished(value: str, reference: str) -> bool:
    r"""A label without a calculation wants an answer without one, because the question can be such a calculation.

    Calculations are + - × ÷ ! between or after numbers, binomials, sums, products, integrals and limits. Roots, powers
    and values of functions are not: \sqrt{16} and \sin 30^\circ are other names of numbers. A variable or
    a sign that no number has, such as 5 \to 6, is no number either.
    """
    if not is_finished(reference):
        return False
    text = _SCIENTIFIC.sub("", value)
    return bool(_OPERATION.search(text)) or (_is_number(reference) and not _CONSTANT.fullmatch(text))


def _is_number(text: str) -> bool:
    return bool(_NUMBERS.fullmatch(_SCIENTIFIC.sub("", text)))


# --------------------------------------------------------------------------------------------------------------- size

_FACTORIAL = re.compile(r"([0-9]+)!")
_POWER = re.compile(r"([0-9]*)([)}]?)\^(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|(.))")


def is_large(value: str, reference: str) -> bool:
    """Numbers with more than about 10,000 digits are not evaluated, because that takes the memory of the judge.

    Such an answer is right only if it is written as the label is.
    """
    return value != reference and (_has_large(value) or _has_large(reference))


def _has_large(text: str) -> bool:
    if any(len(number) > 4 or int(number) > MAX_FACTORIAL for number in _FACTORIAL.findall(text)):
        return True
    if re.search(r"[)}!]!", text) and not re.search("[a-zA-Z]", _COMMAND.sub("", text)):
        return True  # A factorial of a calculation.
    if "binom" in text and re.search("[0-9]{5}", text):
        return True
    for base, _, braced, single in _POWER.findall(text):
        exponent = braced or single
        if re.search("[a-zA-Z]", _COMMAND.sub("", exponent)):
            continue  # The exponent has a variable.
        if re.search(r"\^|!", exponent):
            return True  # A tower.
        digits = re.sub("[^0-9]", "", exponent)
        if len(digits) > 5 or int(digits or 0) * max(1, len(base)) > MAX_POWER:
            return True
    return bool(re.search(r"\^[^()]*\)\^|\^[^{}]*\}\}?\^", _COMMAND.sub("", text))) and not re.search(
        "[a-zA-Z]", _COMMAND.sub("", text)
    )

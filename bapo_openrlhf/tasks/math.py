r"""Mathematics with a final answer in \boxed{}: the paper's math runs (Section 4, Table 4, A.7).

math-verify compares the last box of a response with the label. It reads both as mathematics with sympy. This file
prepares the texts for it; docs/tasks.md links to what that improves, and what is still judged wrongly. An answer in
doubt is wrong, because a policy learns to write what is rewarded by mistake.
"""

import logging
import math
import re
import reprlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from bapo_openrlhf.tasks import forms
from bapo_openrlhf.tasks.notation import group_ends, is_text, parts
from bapo_openrlhf.tasks.task import BadRow, Part, Problem, Source, Task, require, speech, text_key, texts_of, verdict

# ---------------------------------------------------------------------------------------------------- published data

TEXT = ("problem", "Problem", "question")  # The names of this column in different sources.
LABEL = ("answer", "Answer", "final_answer")


def problem(row: Mapping[str, Any]) -> Problem:
    """The problem of a published row; BadRow if text or answer is empty, or no response could equal the answer.

    Only text, answer and OlympiadBench's `is_multiple_answer` are read. OlympiadBench also has `unit` (7 of 674 rows),
    which an answer may have or not, and `error`, a tolerance (1 row).
    """
    text, answer = require(row, [next(filter(row.__contains__, names), names[0]) for names in (TEXT, LABEL)])
    if not isinstance(text, str):
        raise BadRow(f"the text is no string: {reprlib.repr(text)}")
    label = _label(answer)
    if row.get("is_multiple_answer"):
        label = re.sub(r",\s*", ", ", label)  # With blanks, "312, 123, 231" cannot be one number.
    if boxed(rf"\boxed{{{label}}}") != label or not equal(label, label):
        raise BadRow(f"label does not parse: {reprlib.repr(answer)}")
    if not is_mathematics(label):
        raise BadRow(f"label is no mathematics: {reprlib.repr(answer)}")
    return Problem(text=text.strip(), label=label, key=text_key(text))


def _label(answer: Any) -> str:
    """The text of a published answer: a text, a number (AMC has floats such as 142.0), or a list of these."""
    if isinstance(answer, (list, tuple)):
        return ", ".join(map(_label, answer))
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return re.sub(r"(?<!\\)\$", "", str(answer)).strip().rstrip(".").rstrip()


# A label may be "proof" or "notfound", or the whole worked solution. No response equals it, so each right answer would
# get the reward 0.
_GROUP = re.compile(r"\\(?:text\w*|math\w+|mbox|operatorname\*?|begin|end) ?\{[^{}]*\}|_\{[^{}]*\}|\\[a-zA-Z]+")
_FOREIGN = re.compile(r"[\"`#<>]{2}|[\"`#]|\n")
_WORD = re.compile(r"[a-zA-Z]{4,}")
_FUNCTIONS = frozenset(
    (*("sqrt", "frac", "asin", "acos", "atan", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan"),
     *("floor", "ceil", "true", "false", "even", "infty", "infinity"))
)  # fmt: skip


def is_mathematics(label: str) -> bool:
    r"""Whether a label reads as mathematics or a choice. Words count as such only within \text{}."""
    if forms.choice(label) or is_text(label):
        return True
    bare = _GROUP.sub(" ", parts(label)[0])
    words = (word for word in _WORD.findall(bare) if not word.isupper())
    return not _FOREIGN.search(label) and all(word.casefold() in _FUNCTIONS for word in words)


def is_answer(label: str) -> bool:
    """Whether a label reads as mathematics, or is at most three words."""
    return is_mathematics(label) or bool(re.fullmatch(r"[^\W\d_]+(?:[ '-][^\W\d_]+){0,2}", label))


def boxed_prompt(problem: Problem) -> str:
    r"""The problem, and the request for an answer in a box."""
    return f"{problem.text} Let's think step by step and output the final answer within \\boxed{{}}."


# ------------------------------------------------------------------------------------------------------ verification

MAX_LENGTH = 1000  # Characters of an answer. The longest label of the benchmarks has less than 300.
SECONDS = 5  # Limit for reading two answers and comparing them, in processor time, so other processes do not count.
TOLERANCE = 1e-5  # Relative tolerance. math-verify compares six places, where 1.6e-19 would equal 9.1e-31.
# What a unit that one of two answers leaves out may mean.
_SCALES = {"percent": r"\cdot\frac{1}{100}", "degree": r"\cdot\frac{\pi}{180}", "cent": r"\cdot\frac{1}{100}"}

_IMAGINARY = re.compile(r"(?<=[0-9])i(?![a-zA-Z])")  # latex2sympy reads 4i as another variable than 4 i
_BOX = re.compile(r"\\(?:boxed|f(?:rame)?box)(?![a-zA-Z])\s*")
_BARE = re.compile(r"([a-zA-Z0-9])(?![\w^{/(\\]|\.[0-9])")  # \boxed 5 has one character in the box.
_BETWEEN = re.compile(r"\s*\$?\s*(?:,|,?\s*(?:and|\\text ?\{,? ?and ?\}))\s*\$?\s*")


def boxed(response: str) -> str | None:
    r"""The content of the last \boxed{}, \fbox{} or \framebox{}. None: there is none, or the last one is not closed.

    Boxes that only a comma or an "and" separates are one answer, with commas between its values.
    """
    spans: list[tuple[int, int]] = []
    ends = group_ends(response)
    last = None  # where the last box ends
    for box in _BOX.finditer(response):
        if last is not None and box.start() < last:  # It is within another box, and its content is the answer.
            spans.pop()
        elif last is None or not _BETWEEN.fullmatch(response, last, box.start()):
            spans.clear()
        last = box.end()
        if bare := _BARE.match(response, last):
            spans.append(bare.span())
            last = bare.end()
        elif last in ends:
            spans.append((last + 1, ends[last] - 1))
            last = ends[last]
        else:
            spans.clear()
    return ", ".join(response[start:end] for start, end in spans) if spans else None


def answer(response: str) -> str | None:
    """The answer of a response without layout and unit, or None. Equal answers may still differ, as 1/2 and 0.5."""
    content = boxed(speech(response))
    if content is None or len(content) > MAX_LENGTH:
        return None
    return parts(content)[0] or None


def equal(content: str, label: str) -> bool:
    r"""Whether an answer, which is the content of a box, equals the label.

    Commas separate several values. Their order matters only in a tuple. A unit or percent sign may be left out, but if
    both have one, the two must be equal. 50\% also equals 0.5, but 50 does not. 90^\circ also equals \frac{\pi}{2}.
    """
    if max(len(content), len(label)) > MAX_LENGTH:
        return False
    same = forms.same_choice(content, label)
    if same is not None:
        return same
    content, label = forms.choice_text(content), forms.choice_text(label)
    (value, unit), (reference, measure) = parts(content), parts(label)
    units = {unit, measure}
    if not value or not reference or (len(units - {""}) > 1 and units != {"cent", "dollar"}):
        return False
    changed = forms.is_changed(unit, measure, reference) or units == {"cent", "dollar"}
    if value == reference and not changed:
        return True
    words = forms.same_words(value, reference, is_text(content) or is_text(label))
    if words is not None:
        return words
    sides = forms.sides(value, reference, _side)
    if sides is None:
        return False
    value, reference = forms.same_shape(*sides)
    if forms.is_refused(value, reference) or forms.is_other_time(value, reference, unit or measure):
        return False
    if not changed and (value == reference or _same(value, reference)):
        return True
    for name, factor in _SCALES.items():
        if unit != measure and name in (unit, measure):
            return _same(value + factor * (unit == name), reference + factor * (measure == name))
    return False


def _side(side: str, reference: str) -> bool:
    r"""Whether one side of an equation equals the label. It may be a calculation, as in 6 \times 7 = 42."""
    return side == reference or (not forms.is_large(side, reference) and _same(side, reference))


_NAME = re.compile(r"\\(?:begin|end|mathbb|mathcal|operatorname) ?\{[^{}]*\}|\\([a-zA-Z]+)|([a-zA-Z])")
_FREE = "uvwqzkhmnpstyxjlrcba"  # Not e and i, which are numbers, and not d, f, g and o.


def distinct_letters(value: str, reference: str) -> tuple[str, str] | None:
    """Answer and label without two letters that differ only by case. None: there are too few letters.

    R and r are two variables, but math-verify's reader writes every letter small. So a capital letter that also occurs
    as a small one gets the name of another letter, in answer and label alike.
    """
    names = {name[1] or name[2] for text in (value, reference) for name in _NAME.finditer(text)} - {None}
    small = {name for name in names if name[0].islower()}
    capital = sorted(name for name in names if name[0].isupper() and name[0].lower() + name[1:] in small)
    free = [letter for letter in _FREE if not {letter, letter.upper()} & names]
    if len(free) < len(capital):
        return None
    new = dict(zip(capital, free, strict=False))

    def rename(match: re.Match[str]) -> str:
        return new.get(match[1] or match[2], match[0]) + (" " if match[1] in new else "")

    return _NAME.sub(rename, value), _NAME.sub(rename, reference)


class _OutOfTime(BaseException):
    """An answer took SECONDS. It is no Exception because sympy catches these."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise _OutOfTime in the block after SECONDS. Only the main thread can have a timer (`--verifier.*`)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: Any) -> None:
        raise _OutOfTime

    handler = signal.signal(signal.SIGVTALRM, stop)
    # It is raised again each second because mpmath has some bare `except:`.
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, handler)


def _same(value: str, reference: str) -> bool:
    """Whether math-verify finds two answers equal in time."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    if forms.is_decimal(value) and forms.is_decimal(reference):
        return Decimal(value) == Decimal(reference)
    if (renamed := distinct_letters(value, reference)) is None:
        return False
    value, reference = renamed
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # Otherwise it warns that it has no time limit.
    # Its handling of units is off because any last letters are a unit for it: 6m equals 6, and a + b + c equals a + b.
    config = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="last"),
    )
    try:
        with _limited():
            ours, theirs = (
                parse(rf"\boxed{{{_IMAGINARY.sub(' i', text)}}}", [config], parsing_timeout=None)
                for text in (reference, value)
            )
            # The reference comes first, because only the other one may leave out "x =".
            same = verify(ours, theirs, allow_set_relation_comp=True, timeout_seconds=None)
            return same and _is_close(ours[0], theirs[0])
    except _OutOfTime:
        return False


def _is_close(a: Any, b: Any) -> bool:
    """Whether the numbers of two equal answers are within TOLERANCE, also in a tuple, a set or an equation."""
    from sympy.core.relational import Relational

    if isinstance(a, Relational) and isinstance(b, Relational):
        return a.lhs != b.lhs or _is_close(a.rhs, b.rhs)
    pairs = list(zip(_elements(a, a), _elements(b, a), strict=False))
    if pairs != [(a, b)]:
        return all(_is_close(*pair) for pair in pairs)
    try:
        x, y = float(a), float(b)
        # Both are 0 also if they are too small for a float.
        return math.isclose(x, y, rel_tol=TOLERANCE) if x or y else (a - b).doit() == 0
    except (TypeError, ValueError, OverflowError):
        return True  # They are not real numbers.


def _elements(value: Any, reference: Any) -> list[Any]:
    """The elements of a tuple, set, matrix or interval in math-verify's order, and anything else as one element."""
    from math_verify.grader import sort_key
    from sympy import FiniteSet, Interval, MatrixBase, Tuple, ordered

    if isinstance(value, MatrixBase):
        return list(value)
    if not isinstance(value, (Tuple, FiniteSet, Interval)):
        return [value]
    elements = value.args[:2] if isinstance(value, Interval) else value.args
    if isinstance(reference, FiniteSet):
        return list(ordered(elements, sort_key, default=False))
    return list(getattr(value, "_unsorted_args", elements))


def score(response: str, label: str) -> float:
    """r(x, y): 1.0 if the answer in the last box, outside of unfinished thinking, equals the label, otherwise 0.0."""
    content = boxed(speech(response))
    return float(content is not None and equal(content, str(label)))


def takes(label: Any) -> bool:
    """Whether an answer made of a label is right: the label in a box."""
    text = str(label)
    return isinstance(label, (str, int, float)) and is_answer(text) and score(rf"\boxed{{{text}}}", text) == 1.0


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], responses: Sequence[str] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """OpenRLHF's reward function. "extra_logs" has "boxed": 1.0 if there is an answer in a box, right or wrong."""
    texts = texts_of(queries, prompts, responses)
    rewards = [score(text, label) for text, label in zip(texts, labels, strict=True)]
    return verdict(rewards, boxed=[float(answer(text) is not None) for text in texts])


# ---------------------------------------------------------------------------------------------------------- the task

COLUMNS = ("problem", "answer")  # of most sources
_OLYMPIAD = Source(
    "Hothan/OlympiadBench",
    ("question", "final_answer", "is_multiple_answer"),
    config="OE_TO_maths_en_COMP",
    rows=674,
)

TASK = Task(
    name="math",
    file=Path(__file__),
    train=Part("DeepScaleR-Preview", Source("agentica-org/DeepScaleR-Preview-Dataset", COLUMNS, rows=40_315)),
    benchmarks={
        "aime24": Part("AIME24", Source("Maxwell-Jia/AIME_2024", ("Problem", "Answer"), rows=30)),
        "amc": Part("AMC", Source("AI-MO/aimo-validation-amc", COLUMNS, rows=83)),
        "math500": Part("MATH500", Source("HuggingFaceH4/MATH-500", COLUMNS, split="test", rows=500)),
        "minerva": Part("Minerva", Source("math-ai/minervamath", ("question", "answer"), split="test", rows=272)),
        "olympiad": Part("Olympiad", _OLYMPIAD),
    },
    problem=problem,
    prompts={"boxed": boxed_prompt},
    takes=takes,
)

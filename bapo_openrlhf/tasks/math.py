r"""Mathematics with a final answer in \boxed{}: the paper's math runs (Section 4, Table 4, A.7).

The last box of a response is compared with the label by math-verify, which reads both as mathematics, with sympy. It is
called with care; benchmarks/results/math_verifiers.md has what that brings, and what is still judged wrongly. In doubt
an answer is wrong: a policy learns to write what is rewarded by mistake, and of a right answer it has other samples.

The file is light until something has to be compared, for it is the reward function too: OpenRLHF loads it by its path
(`--reward.remote_url bapo_openrlhf/tasks/math.py`).
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_openrlhf.tasks.task import BadRow, Part, Problem, Source, Task, require, text_key

# ---------------------------------------------------------------------------------------------------- published data

TEXT = ("problem", "Problem", "question")  # what the column is called, in one source or another
LABEL = ("answer", "Answer", "final_answer")


def problem(row: Mapping[str, Any]) -> Problem:
    """A published row.

    Columns other than text and answer are not read, but for OlympiadBench's `is_multiple_answer`: its `unit` (7 of 674
    rows) may be written or left out in an answer anyway, and its `error`, a tolerance, is there in one row.

    Raises:
        BadRow: text or answer is empty, or the answer is nothing that a response could be equal to.
    """
    text, answer = require(row, [next(filter(row.__contains__, names), names[0]) for names in (TEXT, LABEL)])
    if not isinstance(text, str):
        raise BadRow(f"the text is no string: {reprlib.repr(text)}")
    label = _label(answer)
    if row.get("is_multiple_answer"):
        label = re.sub(r",\s*", ", ", label)  # with a blank, "312, 123, 231" cannot be one number
    if boxed(rf"\boxed{{{label}}}") != label or not equal(label, label):
        raise BadRow(f"label does not parse: {reprlib.repr(answer)}")
    return Problem(text=text.strip(), label=label, key=text_key(text))


def _label(answer: Any) -> str:
    """An answer as published: a text, a number (AMC has floats, 142.0), or a list of these, one for each value."""
    if isinstance(answer, (list, tuple)):
        return ", ".join(map(_label, answer))
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return re.sub(r"(?<!\\)\$", "", str(answer)).strip().rstrip(".").rstrip()


def boxed_prompt(problem: Problem) -> str:
    r"""The problem, and where to put the answer."""
    return f"{problem.text} Let's think step by step and output the final answer within \\boxed{{}}."


# ------------------------------------------------------------------------------------------------------ verification

MAX_LENGTH = 1000  # characters of an answer; the longest label of the benchmarks has less than 300
SECONDS = 5  # for reading an answer, and for comparing two; whole ones, for they become an alarm
TOLERANCE = 1e-5  # of two decimals, relative; math-verify compares them to six places, where 1.6e-19 is 9.1e-31

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace opens nothing

_INVISIBLE = re.compile(r"\\(?:left|right)(?![a-zA-Z])\.?|\\displaystyle(?![a-zA-Z])|\\!|\\?\$")
_END = " .,;"
_SEPARATOR = re.compile(r"(?<=[0-9])(?:,\\!|\{,\}) ?(?=[0-9]{3})")  # a comma that LaTeX sets as part of a number
_BLANK = re.compile(r"(?:(?<!\\)\\[,;: ]|~|\s)+")  # two backslashes end the row of a matrix
_NEEDLESS_BLANK = re.compile(r"(?<!,) (?![^\W_])|(?<![^\W_])(?<!,) ")  # between no two letters or digits
_COMMA = re.compile(r",(?! )(?![0-9]{3}(?![0-9]))")
_AND = re.compile(r",? ?\\(?:text|textrm|mathrm|mbox)\{,? ?(?:and|or) ?\} ?")
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol) ?\{([^{}]*)\}")
_EXPONENT = re.compile(r"(?<![\w.])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]+)(?!\w)")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?")
_UNIT = re.compile(  # e and i are numbers
    r"(?<=[^\W_]|[})\]])(?:\\?(?P<percent>%)|\^(?:\\circ|\{\\circ\})"
    r"|\\(?:text|textrm|mathrm|mbox)\{(?P<words>(?![ei]\})[^{}0-9,;=]*)\}(?:\^\{?(?P<power>-?[0-9])\}?)?"
    r"|(?<=[0-9])_\{?(?P<base>[0-9]+)\}?)\Z"
)


def boxed(response: str) -> str | None:
    r"""What the last \boxed{} or \fbox{} holds; None without one, and where the last one does not end."""
    start = None
    for box in _BOX.finditer(response):
        start = box.end()
    if start is None or response[start : start + 1] != "{":
        return None
    depth = 0
    for brace in _BRACE.finditer(response, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return response[start + 1 : brace.start()]
    return None


def answer(response: str) -> str | None:
    """The answer of a response without layout and unit, None without one. Equal ones may differ still: 1/2 and 0.5."""
    content = boxed(response)
    if content is None or len(content) > MAX_LENGTH:
        return None
    return _parts(content)[0] or None


def _parts(text: str) -> tuple[str, str]:
    """An answer in one way of writing it, and its unit or the base of its digits; "" for what is not there."""
    text = _INVISIBLE.sub("", _SEPARATOR.sub("", text)).replace("−", "-")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\varnothing", "\\emptyset")
    text = _BLANK.sub(" ", text).strip(" ").rstrip(_END)
    while styled := _STYLED.fullmatch(text):
        text = styled[1].strip(" ").rstrip(_END)
    text = _AND.sub(", ", _COMMA.sub(", ", _NEEDLESS_BLANK.sub("", text)))
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    units = []
    while unit := _UNIT.search(text):
        units.append(_name(unit))
        text = text[: unit.start()]
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    return text, " ".join(units)


def _name(unit: re.Match[str]) -> str:
    if unit["words"] is None:
        return "percent" if unit["percent"] else unit["base"] or "degree"
    name = re.sub(r"[\s.]", "", unit["words"]).casefold()
    return re.sub(r"(?<=\w\w)s\Z", "", name) + (unit["power"] or "")


def equal(given: str, label: str) -> bool:
    r"""Whether an answer, the content of its box, is equal to the label.

    Several values are separated by commas and have no order; those of a tuple have. A unit or percent sign may be
    written or left out, but where both have one it must be the same. 50\% is also 0.5, while 50 is not.
    """
    if max(len(given), len(label)) > MAX_LENGTH:
        return False
    (value, unit), (reference, measure) = _parts(given), _parts(label)
    if not value or not reference or (unit and measure and unit != measure):
        return False
    if value == reference or _same(value, reference):
        return True
    if unit == measure or "percent" not in (unit, measure):
        return False
    return _same(value + "\\%" * (unit == "percent"), reference + "\\%" * (measure == "percent"))


def _same(value: str, reference: str) -> bool:
    """By math-verify; an answer that it cannot read or compare within the time is wrong.

    Its alarm works in the main thread only. In others nothing bounds the time; `--verifier.*` does.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each timeout
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    # Its own units would be any last letters: 6m is 6 to it, and a + b + c is a + b.
    config = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="last"),
    )
    ours, theirs = (parse(rf"\boxed{{{text}}}", [config], parsing_timeout=seconds) for text in (reference, value))
    # The reference first: which of them may leave out "x =" depends on it.
    if not verify(ours, theirs, allow_set_relation_comp=True, timeout_seconds=seconds):
        return False
    try:
        return math.isclose(float(ours[0]), float(theirs[0]), rel_tol=TOLERANCE)
    except (TypeError, ValueError, OverflowError):
        return True  # no real numbers


def score(response: str, label: str) -> float:
    r"""r(x, y): 1.0 when the answer in the last box of the response is equal to the label, else 0.0."""
    content = boxed(response)
    return float(content is not None and equal(content, str(label)))


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **kwargs: Any) -> dict[str, Any]:
    """OpenRLHF's reward function.

    Args:
        queries: prompt and response in one text each.
        prompts, labels: prompt and reference answer of each query.

    Returns:
        "rewards" and "scores", (len(queries),); "extra_logs" with "boxed" of the same shape: 1.0 where there is an
        answer in a box, right or wrong.
    """
    # A tokenizer may put a token before the prompt, so the prompt is looked for, not cut off by its length. One that
    # writes the prompt in another way leaves it there: its box is not the last one.
    responses = [
        query.partition(prompt)[2] if prompt and prompt in query else query
        for query, prompt in zip(queries, prompts, strict=True)
    ]
    rewards = _vector([score(response, label) for response, label in zip(responses, labels, strict=True)])
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"boxed": _vector([float(answer(response) is not None) for response in responses])},
    }


def _vector(numbers: list[float]) -> Any:
    """A float tensor, as OpenRLHF's own engine wants it; a list in a process that has no torch and need not load it."""
    torch = sys.modules.get("torch")
    return numbers if torch is None else torch.tensor(numbers, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------- the task

TASK = Task(
    name="math",
    file=Path(__file__),
    train=Part(
        "DeepScaleR-Preview",
        Source("agentica-org/DeepScaleR-Preview-Dataset", ("problem", "answer"), rows=40_315),
    ),
    benchmarks={
        "aime24": Part("AIME24", Source("Maxwell-Jia/AIME_2024", ("Problem", "Answer"), rows=30)),
        "amc": Part("AMC", Source("AI-MO/aimo-validation-amc", ("problem", "answer"), rows=83)),
        "math500": Part("MATH500", Source("HuggingFaceH4/MATH-500", ("problem", "answer"), split="test", rows=500)),
        "minerva": Part("Minerva", Source("math-ai/minervamath", ("question", "answer"), split="test", rows=272)),
        "olympiad": Part(
            "Olympiad",
            Source(
                "Hothan/OlympiadBench",
                ("question", "final_answer", "is_multiple_answer"),
                config="OE_TO_maths_en_COMP",
                rows=674,
            ),
        ),
    },
    problem=problem,
    prompts={"boxed": boxed_prompt},
)

r"""Mathematics with a final answer in \boxed{}: the paper's math runs (Section 4, Table 4, A.7).

math-verify compares the last box of a response with the label. It reads both as mathematics with sympy. This file
prepares the texts for it; benchmarks/results/math_verifiers.md shows what that improves and what is still judged
wrongly. An answer in doubt is wrong, because a policy learns to write what is rewarded by mistake.

The file imports little before it compares something, because it is also the reward file: OpenRLHF loads it by its path
(`--reward.remote_url bapo_openrlhf/tasks/math.py`).
"""

import logging
import math
import re
import reprlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_openrlhf.tasks.task import BadRow, Part, Problem, Source, Task, require, text_key, vector

# ---------------------------------------------------------------------------------------------------- published data

TEXT = ("problem", "Problem", "question")  # The names of this column in different sources.
LABEL = ("answer", "Answer", "final_answer")


def problem(row: Mapping[str, Any]) -> Problem:
    """The problem of a published row.

    Only text, answer and OlympiadBench's `is_multiple_answer` are read. OlympiadBench also has `unit` (7 of 674 rows),
    which an answer may have or not, and `error`, a tolerance (1 row).

    Raises:
        BadRow: Text or answer is empty, or no response could equal the answer.
    """
    text, answer = require(row, [next(filter(row.__contains__, names), names[0]) for names in (TEXT, LABEL)])
    if not isinstance(text, str):
        raise BadRow(f"the text is no string: {reprlib.repr(text)}")
    label = _label(answer)
    if row.get("is_multiple_answer"):
        label = re.sub(r",\s*", ", ", label)  # With blanks, "312, 123, 231" cannot be one number.
    if boxed(rf"\boxed{{{label}}}") != label or not equal(label, label):
        raise BadRow(f"label does not parse: {reprlib.repr(answer)}")
    return Problem(text=text.strip(), label=label, key=text_key(text))


def _label(answer: Any) -> str:
    """The text of a published answer: a text, a number (AMC has floats such as 142.0), or a list of these."""
    if isinstance(answer, (list, tuple)):
        return ", ".join(map(_label, answer))
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return re.sub(r"(?<!\\)\$", "", str(answer)).strip().rstrip(".").rstrip()


def boxed_prompt(problem: Problem) -> str:
    r"""The problem, and the request for an answer in a box."""
    return f"{problem.text} Let's think step by step and output the final answer within \\boxed{{}}."


# ------------------------------------------------------------------------------------------------------ verification

MAX_LENGTH = 1000  # Characters of an answer. The longest label of the benchmarks has less than 300.
SECONDS = 5  # Limit for reading an answer, and for comparing two. It is an integer because an alarm needs one.
TOLERANCE = 1e-5  # Relative tolerance. math-verify compares six places, where 1.6e-19 would equal 9.1e-31.

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # An escaped brace does not open anything.

_INVISIBLE = re.compile(r"\\(?:left|right)(?![a-zA-Z])\.?|\\displaystyle(?![a-zA-Z])|\\!|\\?\$")
_END = " .,;"
_SEPARATOR = re.compile(r"(?<=[0-9])(?:,\\!|\{,\}) ?(?=[0-9]{3})")  # A comma within a number in LaTeX.
_BLANK = re.compile(r"(?:(?<!\\)\\[,;: ]|~|\s)+")  # Two backslashes end the row of a matrix.
_NEEDLESS_BLANK = re.compile(r"(?<!,) (?![^\W_])|(?<![^\W_])(?<!,) ")  # A blank that is not between letters or digits.
_COMMA = re.compile(r",(?! )(?![0-9]{3}(?![0-9]))")
_AND = re.compile(r",? ?\\(?:text|textrm|mathrm|mbox)\{,? ?(?:and|or) ?\} ?")
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol) ?\{([^{}]*)\}")
_EXPONENT = re.compile(r"(?<![\w.])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]+)(?!\w)")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?")
_UNIT = re.compile(  # It excludes e and i because they are numbers.
    r"(?<=[^\W_]|[})\]])(?:\\?(?P<percent>%)|\^(?:\\circ|\{\\circ\})"
    r"|\\(?:text|textrm|mathrm|mbox)\{(?P<words>(?![ei]\})[^{}0-9,;=]*)\}(?:\^\{?(?P<power>-?[0-9])\}?)?"
    r"|(?<=[0-9])_\{?(?P<base>[0-9]+)\}?)\Z"
)


def boxed(response: str) -> str | None:
    r"""The content of the last \boxed{} or \fbox{}. None: there is none, or the last one is not closed."""
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
    """The answer of a response without layout and unit, or None. Equal answers may still differ, as 1/2 and 0.5."""
    content = boxed(response)
    if content is None or len(content) > MAX_LENGTH:
        return None
    return _parts(content)[0] or None


def _parts(text: str) -> tuple[str, str]:
    """An answer in a uniform notation, and its unit or the base of its digits. A missing part is empty."""
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
    r"""Whether an answer, which is the content of a box, equals the label.

    Commas separate several values. Their order matters only in a tuple. A unit or percent sign may be left out, but if
    both have one, the two must be equal. 50\% also equals 0.5, but 50 does not.
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
    """Whether math-verify finds two answers equal. An answer that it cannot read or compare in time is wrong.

    Its alarm works only in the main thread. For other threads `--verifier.*` limits the time.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # Otherwise it warns of each timeout.
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    # Its handling of units is off because any last letters are a unit for it: 6m equals 6, and a + b + c equals a + b.
    config = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="last"),
    )
    ours, theirs = (parse(rf"\boxed{{{text}}}", [config], parsing_timeout=seconds) for text in (reference, value))
    # The reference comes first, because only the other one may leave out "x =".
    if not verify(ours, theirs, allow_set_relation_comp=True, timeout_seconds=seconds):
        return False
    try:
        return math.isclose(float(ours[0]), float(theirs[0]), rel_tol=TOLERANCE)
    except (TypeError, ValueError, OverflowError):
        return True  # They are not real numbers.


def score(response: str, label: str) -> float:
    r"""r(x, y): 1.0 if the answer in the last box of the response equals the label, otherwise 0.0."""
    content = boxed(response)
    return float(content is not None and equal(content, str(label)))


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **kwargs: Any) -> dict[str, Any]:
    """OpenRLHF's reward function.

    Args:
        queries: Prompt and response in one text each.
        prompts: The prompts.
        labels: The reference answers.

    Returns:
        As `rewards_of`.
    """
    # The prompt is searched for because a tokenizer may put a token before it. If the decoded prompt differs, it stays
    # in the response. Its box does not matter then because the response's own box is the last one.
    responses = [
        query.partition(prompt)[2] if prompt and prompt in query else query
        for query, prompt in zip(queries, prompts, strict=True)
    ]
    return rewards_of(responses, labels)


def rewards_of(responses: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """The result of a reward function for responses without their prompts.

    Returns:
        "rewards" and "scores" of shape (len(responses),), and "extra_logs" with "boxed" of the same shape. It is 1.0 if
        there is an answer in a box, right or wrong.
    """
    rewards = vector([score(response, label) for response, label in zip(responses, labels, strict=True)])
    boxed = vector([float(answer(response) is not None) for response in responses])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"boxed": boxed}}


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

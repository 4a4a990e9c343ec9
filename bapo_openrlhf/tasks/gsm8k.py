r"""GSM8K: word problems of primary school with worked solutions (Cobbe et al., arXiv 2110.14168).

A published answer is a solution with a calculation in each pair of << >>, and a last line such as "#### 1,200". The
number is the label. A response has its final answer in \boxed{}.

tasks/math.py judges the responses: `reward_func` and `answer`, which majority votes need, are its functions.
"""

import dataclasses
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo_openrlhf.tasks import math as mathematics
from bapo_openrlhf.tasks.math import answer as answer
from bapo_openrlhf.tasks.math import reward_func as reward_func
from bapo_openrlhf.tasks.task import BadRow, Part, Problem, Source, Task, require

COLUMNS = ("question", "answer")
_NUMBER = re.compile(r"-?[0-9]*\.?[0-9]+")
_CALCULATION = re.compile(r"<<.*?>>")


def problem(row: Mapping[str, Any]) -> Problem:
    r"""The problem of a published row. Its solution has no calculations in << >>, and it ends in \boxed{label}.

    BadRow says that question or answer is empty, or that the answer does not end in #### and a number.
    """
    question, published = require(row, COLUMNS)
    steps, mark, last = str(published).rpartition("####")
    label = last.strip().replace(",", "")
    if not mark:
        raise BadRow(f"no #### in the answer: {reprlib.repr(published)}")
    if not _NUMBER.fullmatch(label):
        raise BadRow(f"no number after ####: {reprlib.repr(last)}")
    read = mathematics.problem({"question": question, "answer": label})
    solution = _CALCULATION.sub("", steps) + rf"The final answer is \boxed{{{label}}}"
    return dataclasses.replace(read, solution=solution)


def _part(split: str, rows: int) -> Part:
    return Part("GSM8K", Source("openai/gsm8k", COLUMNS, split=split, config="main", rows=rows))


TASK = Task(
    name="gsm8k",
    file=Path(__file__),
    train=_part("train", 7_473),
    benchmarks={"gsm8k": _part("test", 1_319)},
    problem=problem,
    prompts={"boxed": mathematics.boxed_prompt},
    takes=mathematics.takes,
)

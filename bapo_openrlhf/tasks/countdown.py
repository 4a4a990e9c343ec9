"""Countdown: reach a target with + - * / from given numbers, each used exactly once (paper: Section 4, Table 4).

    3 5 7:22           a problem: source numbers, target
    3*5+7              a right answer, reward 1; any other answer has reward 0

The answer is parsed and computed with exact fractions. It is never run as code. Problems are published or generated. A
generated problem is solvable because it is made from its solution.
"""

import ast
import hashlib
import operator
import random
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks.task import BadRow, Part, Problem, Source, Task, require, shares, speech, texts_of, verdict

# ---------------------------------------------------------------------------------------------------- published data

COLUMNS = ("nums", "target")


def format_problem(numbers: Sequence[int], target: int) -> str:
    """Source numbers and target in one text, for example "3 5 7:22"."""
    return f"{' '.join(map(str, numbers))}:{target}"


_PROBLEM = re.compile(r"([0-9]+(?: [0-9]+)+):([0-9]+)")


def parse_problem(text: str) -> tuple[list[int], int]:
    """The source numbers and the target. Another form than that of `format_problem` is a ValueError."""
    match = _PROBLEM.fullmatch(text)
    if not match:
        raise ValueError(f"label is {text!r}; it must be a Countdown problem such as '3 5 7:22'")
    numbers, target = match.groups()
    return [int(number) for number in numbers.split(" ")], int(target)


def make_problem(numbers: Sequence[int], target: int) -> Problem:
    """The problem with its numbers in the given order. The key does not depend on the order."""
    canonical = format_problem(sorted(numbers), target)
    return Problem(text=format_problem(numbers, target), label=canonical, key=canonical)


def problem(row: Mapping[str, Any]) -> Problem:
    """The problem of a published row such as {"nums": [44, 19, 35], "target": 98}. BadRow says that it is none."""
    numbers, target = require(row, COLUMNS)
    if not isinstance(numbers, list) or not all(map(_is_positive, numbers)):
        raise BadRow(f"nums are no positive integers: {reprlib.repr(numbers)}")
    if len(numbers) < 2:
        raise BadRow(f"fewer than two nums: {numbers}")
    if not _is_positive(target):
        raise BadRow(f"target is no positive integer: {reprlib.repr(target)}")
    return make_problem(numbers, target)


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0  # This excludes True.


# ----------------------------------------------------------------------------------------------------------- prompts


def words_prompt(problem: Problem) -> str:
    """The problem in words, for a language model."""
    numbers, target = parse_problem(problem.text)
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    return (
        f"Make {target} from the numbers {listed}. Use each of them exactly once, and no other number, with the "
        "operations + - * / and parentheses. Show your reasoning. Then give the final expression, and nothing else, "
        "within <answer> </answer>."
    )


def short_prompt(problem: Problem) -> str:
    """A prompt such as "3 5 7:22=" for the small model of configs/countdown. The whole response is the answer."""
    return f"{problem.text}="


# ------------------------------------------------------------------------------------------------- generated problems


class Level(NamedTuple):
    """A level of difficulty: `size` source numbers within 1..max_number, a target within min_target..max_target."""

    size: int
    max_number: int
    max_target: int = 99
    min_target: int = 1


LEVELS: dict[str, Level] = {
    # A level with fewer numbers takes them from a wider range, so that each level has enough different problems.
    "easy": Level(size=2, max_number=25),
    "medium": Level(size=3, max_number=12),
    "hard": Level(size=4, max_number=9),
    # These two levels are those of the published data.
    "three": Level(size=3, max_number=99, min_target=10),
    "four": Level(size=4, max_number=99, min_target=10),
}
DEFAULT_MIX: dict[str, float] = {"easy": 0.25, "medium": 0.5, "hard": 0.25}
# The share of each level, by generator and part.
GENERATORS: dict[str, dict[str, dict[str, float]]] = {
    "published": {"train": {"three": 0.5, "four": 0.5}, "cd34": {"three": 0.5, "four": 0.5}, "cd4": {"four": 1.0}},
    "small": {"train": DEFAULT_MIX, "cd34": {"medium": 0.5, "hard": 0.5}, "cd4": {"hard": 1.0}},
}
TEST_SHARE = 8  # One problem in eight belongs to the test split.
MISSES = 20_000  # After so many attempts without a new problem a level counts as exhausted.


class Puzzle(NamedTuple):
    """Source numbers in ascending order, the target, and one expression that reaches the target."""

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def problem(self) -> Problem:
        """The problem without its solution."""
        return make_problem(self.numbers, self.target)

    @property
    def split(self) -> str:
        """Either "train" or "test". Only the problem decides, so the two never overlap for any seed or size."""
        return "test" if hashlib.sha256(short_prompt(self.problem).encode()).digest()[0] % TEST_SHARE == 0 else "train"


_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class Term(NamedTuple):
    """A partial expression: its value, its text, and the precedence of its outermost operator (3 for a number)."""

    value: int
    text: str
    precedence: int


def join(left: Term, op: str, right: Term) -> Term | None:
    """`left op right` with only the necessary parentheses. None means that the value is not a positive integer.

    The larger operand of + and * comes first, because fewer forms of the same expression are easier to learn.
    """
    if op == "/":
        if left.value % right.value:
            return None
        value = left.value // right.value
    else:
        value = {"+": left.value + right.value, "-": left.value - right.value, "*": left.value * right.value}[op]
    if value < 1:
        return None
    if op in "+*" and left.value < right.value:
        left, right = right, left
    precedence = _PRECEDENCE[op]
    # a-(b-c) and a/(b*c) need parentheses on the right although the precedence is equal.
    right_needs = right.precedence < precedence or (right.precedence == precedence and op in "-/")
    left_text = f"({left.text})" if left.precedence < precedence else left.text
    right_text = f"({right.text})" if right_needs else right.text
    return Term(value, f"{left_text}{op}{right_text}", precedence)


def random_expression(rng: random.Random, numbers: Sequence[int]) -> tuple[str, int]:
    """A random expression that uses each number once, and its value. All partial values are positive integers."""
    terms = [Term(number, str(number), 3) for number in numbers]
    while len(terms) > 1:
        i, j = rng.sample(range(len(terms)), 2)
        joined = join(terms[i], rng.choice("+-*/"), terms[j])
        if joined is not None:
            terms = [term for k, term in enumerate(terms) if k not in (i, j)] + [joined]
    return terms[0].text, terms[0].value


def make_puzzle(rng: random.Random, level: str) -> Puzzle:
    """A puzzle of a level. It is solvable because it is made from its solution."""
    size, max_number, max_target, min_target = LEVELS[level]
    while True:
        numbers = sorted(rng.randint(1, max_number) for _ in range(size))
        text, value = random_expression(rng, numbers)
        if min_target <= value <= max_target:
            return Puzzle(tuple(numbers), value, text)


def make_puzzles(generator: str, part: str, n: int, seed: int) -> list[Puzzle]:
    """`n` different puzzles in random order. The part train takes the train split, and all others the test split.

    Raises:
        ConfigError: There are fewer than n puzzles.
    """
    mix, puzzles = GENERATORS[generator][part], []
    for level, count in shares(n, mix).items():
        rng = random.Random(f"{seed}/{part}/{level}")
        of_level = _new_puzzles(rng, level, "train" if part == "train" else "test", count)
        if len(of_level) < count:
            raise ConfigError(
                f"{generator}/{part}: the number of problems is {n}, {count} of them of level {level}, which has only "
                f"{len(of_level)} different ones; it must be at most {int(len(of_level) / mix[level])}"
            )
        puzzles += of_level
    random.Random(f"{seed}/{part}").shuffle(puzzles)
    return puzzles


def _new_puzzles(rng: random.Random, level: str, split: str, count: int) -> list[Puzzle]:
    puzzles: dict[str, Puzzle] = {}
    misses = 0
    while len(puzzles) < count and misses < MISSES:
        puzzle = make_puzzle(rng, level)
        key = format_problem(puzzle.numbers, puzzle.target)
        if puzzle.split == split and key not in puzzles:
            puzzles[key] = puzzle
            misses = 0
        else:
            misses += 1
    return list(puzzles.values())


def generate(generator: str, part: str, n: int, seed: int) -> Iterator[Problem]:
    """`n` different problems, equal for equal arguments. Training ones are no test ones; cd34 and cd4 may overlap."""
    return iter([puzzle.problem for puzzle in make_puzzles(generator, part, n, seed)])


# ------------------------------------------------------------------------------------------------------ verification

MAX_LENGTH = 64  # Characters of an expression. Four two-digit numbers with all parentheses need less than 20.

_ALLOWED = re.compile(r"[0-9+\-*/()]+")  # Only ASCII digits: no blanks, dots, letters or underscores.
_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class ExpressionError(ValueError):
    """An answer is not an expression of the task. The message says why."""


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and its numbers from left to right.

    Only non-negative decimal integers, + - * / with two operands, and parentheses are allowed. The value is computed
    from the tree of `ast` in eval mode. Nothing is compiled or run.

    Raises:
        ExpressionError: The text is not such an expression, divides by zero, or exceeds MAX_LENGTH.
    """
    if len(expression) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    if not _ALLOWED.fullmatch(expression):
        raise ExpressionError("characters other than 0-9 + - * / ( )")
    if _LEADING_ZERO.search(expression):
        raise ExpressionError("a number with a leading zero")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError("no expression") from error
    numbers: list[int] = []
    return _value(tree.body, numbers), numbers


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """The value of a parsed node. Appends its numbers. MAX_LENGTH bounds the recursion."""
    match node:
        case ast.Constant(value=int() as number):
            numbers.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            a, b = _value(left, numbers), _value(right, numbers)
            try:
                return _OPERATIONS[type(op)](a, b)
            except ZeroDivisionError:
                raise ExpressionError("division by zero") from None
    raise ExpressionError(f"{type(node).__name__} is not allowed")


def value_over(expression: str, numbers: Sequence[int]) -> Fraction | None:
    """The value of an expression that uses each number exactly once. None means that it is not such an expression."""
    try:
        value, operands = evaluate(expression)
    except ExpressionError:
        return None
    return value if sorted(operands) == sorted(numbers) else None


# A whole response that is only an expression and special tokens after it.
_RESPONSE = re.compile(r"([0-9+\-*/()]+)(?:<eos>|<pad>|</s>|<\|[a-z_]+\|>|<end_of_(?:turn|utterance)>|<｜[a-z▁]+｜>)*")
_TWO_NUMBERS = re.compile(r"[0-9]\s+[0-9]")  # "3 5" must not become 35.
_WRITTEN = {
    "*": re.compile(r"[×·⋅∗]|\\(?:times|cdot|ast)(?![a-zA-Z])"),
    "/": re.compile(r"÷|\\div(?![a-zA-Z])"),
    "-": re.compile(r"[−–]"),
    "(": re.compile(r"(?:\\left)?[(\[]"),
    ")": re.compile(r"(?:\\right)?[)\]]"),
}
_FORMULA = re.compile(r"\\[(\[](.*)\\[)\]]")
MAX_EQUALS = 4  # Signs of equality in an answer. 3*5+7=15+7=22 has two.


def answer(response: str) -> str | None:
    r"""The expression that a response gives as its answer, without blanks. None means that there is none.

    It is the content of the last <answer>...</answer>. Blanks, dollar signs or \( \) around it, square brackets, and
    ×, \times, \cdot, ÷ and \div are allowed there. An equation is an answer if it is true: 3*5+7 = 22, and 22 = 3*5+7.
    Then the expression is its first side that is no number. A response without these tags must be an expression, then
    special tokens. Time and memory are linear in the length of the text.
    """
    response = speech(response)
    before, closed, _ = response.rpartition("</answer>")
    if not closed:
        match = _RESPONSE.fullmatch(response)
        return match and match.group(1)
    _, opened, text = before.rpartition("<answer>")
    if not opened or _TWO_NUMBERS.search(text):
        return None
    text = "".join(text.split()).strip("$")
    formula = _FORMULA.fullmatch(text)
    text = formula[1] if formula else text
    for sign, forms in _WRITTEN.items():
        text = forms.sub(sign, text)
    return _solution(text.split("=", MAX_EQUALS))


def _solution(sides: Sequence[str]) -> str | None:
    """None also for a false chain such as 3+4=7=8, because a policy would learn to add what cannot be wrong."""
    if not all(_ALLOWED.fullmatch(side) for side in sides):
        return None
    if len(sides) > 1:
        try:
            if len({evaluate(side)[0] for side in sides}) > 1:
                return None
        except ExpressionError:
            return None
    return next((side for side in sides if not side.isdigit()), sides[0])


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], responses: Sequence[str] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """OpenRLHF's reward function: 1.0 for a right answer, otherwise 0.0. The words of the prompts do not matter.

    Labels are problems, for example "3 5 7:22"; another one is a ValueError. "extra_logs" has "well_formed": 1.0 if the
    answer is an expression with exactly the source numbers, whatever its value. A response never raises an error.
    """
    rewards, well_formed = [], []
    for response, label in zip(texts_of(queries, prompts, responses), labels, strict=True):
        numbers, target = parse_problem(label)
        expression = answer(response)
        value = None if expression is None else value_over(expression, numbers)
        rewards.append(float(value == target))
        well_formed.append(float(value is not None))
    return verdict(rewards, well_formed=well_formed)


# ---------------------------------------------------------------------------------------------------------- the task

_CD34 = Source("Jiayi-Pan/Countdown-Tasks-3to4", columns=COLUMNS, rows=490_364)
_CD4 = Source("Jiayi-Pan/Countdown-Tasks-4", columns=COLUMNS)
HELD_OUT = 200

TASK = Task(
    name="countdown",
    file=Path(__file__),
    # The training problems come after the test problems of the same source.
    train=Part("Countdown-Tasks-3to4", _CD34, first=HELD_OUT, count=10_000, shuffled=True),
    benchmarks={
        "cd34": Part("CD-34", _CD34, count=HELD_OUT, shuffled=True),
        "cd4": Part("CD-4", _CD4, count=HELD_OUT, shuffled=True),
    },
    problem=problem,
    prompts={"words": words_prompt, "short": short_prompt},
    generate=generate,
    sizes={
        "published": {"train": 10_000, "cd34": HELD_OUT, "cd4": HELD_OUT},
        # The train part is 48 steps of 32 prompts. With this mix there are 2852 at most.
        "small": {"train": 1536, "cd34": HELD_OUT, "cd4": HELD_OUT},
    },
)

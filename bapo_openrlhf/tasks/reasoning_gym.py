"""reasoning-gym: a hundred procedural tasks of the package `reasoning-gym`, scored by the library's own functions.

A label is a Python literal with the library's task, the parameters and the entry. A literal keeps tuples and whole
numbers as keys, which JSON does not. An entry is stored because four tasks would not make it again in another process:
they depend on the order of a set.

Some of the library's functions run what a model has written: they call `eval`, or sympy's `parse_expr`, which calls it.
FENCES lets only answers through that can do no harm there. LITERALS are the modules whose `eval` is replaced by
`ast.literal_eval`. Scores may lie between 0 and 1.
"""

import ast
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.tasks import worked
from bapo_openrlhf.tasks.task import Part, Problem, Source, Task, shares, speech, texts_of, verdict
from bapo_openrlhf.user_file import read_yaml

VERSION = "0.1.25"  # FENCES and LITERALS were found in this version.

# ------------------------------------------------------------------------------------------------------- the library


@functools.cache
def library() -> Any:
    """The module `reasoning_gym.factory`, with LITERALS in place; a ConfigError if it is not there in this version."""
    try:
        factory = importlib.import_module("reasoning_gym.factory")
        importlib.import_module("reasoning_gym")  # It registers the tasks.
        installed = importlib.metadata.version("reasoning-gym")
    except ImportError as error:
        installed = f"none ({one_line(error)})"
    if installed != VERSION:
        raise ConfigError(
            f"the package reasoning-gym has version {installed}; it must be {VERSION}: `pip install "
            f"reasoning-gym=={VERSION}` installs it"
        )
    for name in LITERALS:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
    return factory


REFUSED = {
    "coin_flip": "its judge takes the first digit of an answer for the whole",
    "codeio": "it runs programs of its data",
    "composite": "it mixes other tasks, which several names do here",
    "game_of_life_halting": "its judge takes every answer for right",
    "propositional_logic": "its judge takes a premise for a conclusion",
    "puzzle24": "its judge does not compare the numbers with those of the problem",
}
LITERALS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
MAX_LENGTH = 10_000  # Characters of an answer.
MAX_FORMULA = 500  # Characters of an answer that is computed.
MAX_POWER = 99  # Otherwise 9**9**9 would take all memory.
ROUNDING = 1e-6  # By which a score may be outside 0..1. It is then 0 or 1.
MAY_BE_NAN = ("complex_arithmetic", "number_sorting")  # Their judges take a number that is none for right.
_OPERATIONS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd)
_FUNCTIONS = (
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "Abs"),  # Not Integral: the judge would take the question for its answer.
)
FENCES = {  # Whether names of variables and functions are allowed.
    "countdown": False,
    "intermediate_integration": True,
    "polynomial_multiplication": True,
    "simple_integration": True,
}


def harmless(answer: str, *, names: bool) -> bool:
    """Whether an answer is a formula that sympy may compute: whole numbers, + - * /, parentheses.

    With `names`, decimals, **, one-letter variables, pi and the functions of _FUNCTIONS are allowed, too.
    """
    if len(answer) > MAX_FORMULA:
        return False
    try:
        return _allowed(ast.parse(answer.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _allowed(node: ast.AST, names: bool) -> bool:
    match node:
        case ast.Constant(value=number):
            return type(number) in ((int, float) if names else (int,))
        case ast.Name(id=name):
            return names and (len(name) == 1 or name == "pi")
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return names and name in _FUNCTIONS and all(_allowed(argument, names) for argument in arguments)
        case ast.UnaryOp(op=op, operand=operand):
            return isinstance(op, _OPERATIONS) and _allowed(operand, names)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            numbers = [part.value for part in ast.walk(right) if isinstance(part, ast.Constant)]
            small = all(type(number) in (int, float) and number <= MAX_POWER for number in numbers)
            divided = all(isinstance(part.op, ast.Div) for part in ast.walk(right) if isinstance(part, ast.BinOp))
            return names and small and divided and _allowed(left, names) and _allowed(right, names)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, _OPERATIONS) and _allowed(left, names) and _allowed(right, names)
    return False


# ------------------------------------------------------------------------------------------------------ what is asked


class Kind(NamedTuple):
    """One kind of problems.

    Attributes:
        name: Its name here, which is also that of its benchmark.
        weight: Its share of the training data. With 0 it is only a benchmark.
        steps: Share of the warm-up's solutions that write their steps, if `worked` can. The others are only an answer.
    """

    name: str
    task: str
    parameters: dict[str, Any]
    weight: float
    steps: float


_WORD = re.compile(r"(?P<name>[\w-]+(?:@(?P<level>[0-9]+))?)(?::(?P<weight>[0-9.]+))?")
_OWN = ("task", "level", "weight", "steps")  # the keys of an entry of the file that are no parameters of the library
_SET_HERE = ("seed", "size")  # parameters of the library that no entry has


def requested_kinds(tasks: str | None, config: Path | None) -> list[Kind]:
    """The kinds of problems that `--tasks` and `--config` name; a ConfigError if one is not possible.

    Args:
        tasks: Words NAME[@LEVEL][:WEIGHT], separated by commas. A name is one of the file, or a task of the library. A
            level, from 0, is that of the library's curriculum. None means all names of the file.
        config: A YAML file of names, each with `task` (by default the name), `level`, `weight`, `steps` and parameters.
    """
    entries = _entries(config) if config else {}
    words = [word.strip() for word in (tasks or ",".join(entries)).split(",")]
    kinds = []
    for word in words:
        match = _WORD.fullmatch(word)
        if not match or (match["weight"] and _weight(match["weight"]) is None):
            raise ConfigError(
                f"--tasks has {word!r}; each must be NAME, NAME@LEVEL or NAME:WEIGHT, with a weight of at least 0"
            )
        name = match["name"].partition("@")[0]
        entry = dict(entries.get(name, {}))
        if match["level"]:
            entry["level"] = int(match["level"])
        if match["weight"]:
            entry["weight"] = match["weight"]
        kinds.append(_kind(match["name"], name, entry, list(entries)))
    twice = next((kind.name for kind in kinds if sum(kind.name == other.name for other in kinds) > 1), None)
    if twice is not None:
        raise ConfigError(f"--tasks has {twice} twice; a name may be given once")
    if not any(kind.weight for kind in kinds):
        raise ConfigError("all weights are 0; at least one must be above 0")
    return kinds


def _entries(config: Path) -> dict[str, dict[str, Any]]:
    content = read_yaml("--config", config)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--config is {config}; it must have a mapping of names")
    for name, entry in content.items():
        if entry is not None and not isinstance(entry, dict):
            raise ConfigError(f"{config}: {name} is {entry!r}; it must be a mapping of task, level, weight, parameters")
    return {str(name): entry or {} for name, entry in content.items()}


def _weight(value: Any) -> float | None:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        return None
    return weight if 0 <= weight < math.inf else None


def _kind(title: str, name: str, entry: Mapping[str, Any], entries: Sequence[str]) -> Kind:
    factory = library()
    task, weight = entry.get("task", name), _weight(entry.get("weight", 1))
    if task in REFUSED:
        raise ConfigError(f"task is {task}; it is refused because {REFUSED[task]}")
    if task not in factory.DATASETS:
        close = difflib.get_close_matches(str(task), [*entries, *factory.DATASETS], n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"task is {task!r}; it must be one of reasoning-gym's {len(factory.DATASETS)}{hint}")
    if weight is None:
        raise ConfigError(f"{title}: weight is {entry['weight']!r}; it must be a number of at least 0")
    steps = _weight(entry.get("steps", 1))
    if steps is None or steps > 1:
        raise ConfigError(f"{title}: steps is {entry['steps']!r}; it must be a share within 0..1")
    parameters = {key: value for key, value in entry.items() if key not in _OWN}
    names = [field.name for field in dataclasses.fields(factory.DATASETS[task][1]) if field.name not in _SET_HERE]
    unknown = next((key for key in parameters if key not in names), None)
    if unknown is not None:
        raise ConfigError(f"{title}: {unknown} is no parameter of {task}; it has {', '.join(names)}")
    try:
        if "level" in entry:
            parameters = _of_level(factory, task, entry["level"]) | parameters
        factory.create_dataset(task, **parameters, seed=0)
    except (AssertionError, ValueError, TypeError) as error:
        words = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        raise ConfigError(
            f"{title}: reasoning-gym refuses {task} with {words or 'no parameters'}: {one_line(error)}"
        ) from None
    return Kind(title, task, parameters, weight, steps)


def _of_level(factory: Any, task: str, level: Any) -> dict[str, Any]:
    """The parameters of a level of the library's curriculum. An attribute with fewer levels stays at its last one."""
    if not factory.has_curriculum(task):
        raise ValueError("it has no levels")
    curriculum = factory.create_curriculum(task)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if type(level) is not int or not 0 <= level <= highest:
        raise ValueError(f"level is {level!r}; it must be 0..{highest}")
    curriculum.set_global_level(level)
    parameters = dataclasses.asdict(curriculum.generate_configuration())
    usual = dataclasses.asdict(factory.DATASETS[task][1]())
    return {key: value for key, value in parameters.items() if key not in _SET_HERE and value != usual[key]}


# ----------------------------------------------------------------------------------------------------------- problems

# Of 8 problems, 2 belong to the warm-up and 1 to the tests. Only the question decides, so the parts never overlap.
_SHARES = {"warmup": (0, 1), "train": (2, 3, 4, 5, 6)}
_TEST = (7,)
BLOCK = 4_096  # Entries that are asked for at a time. Some tasks make all of them at once.
MISSES = 2_000  # After so many entries without a new problem a kind counts as exhausted.


def problems(kind: Kind, part: str, count: int, seed: int) -> list[Problem]:
    """Different problems of a kind. There are fewer than `count` if the kind is nearly exhausted."""
    by_question: dict[str, Problem] = {}
    index = missed = 0
    while len(by_question) < count and missed < MISSES:
        if index % BLOCK == 0:
            data = library().create_dataset(kind.task, **kind.parameters, seed=seed + 1_000_003 * index, size=BLOCK)
        try:
            entry, index, missed = data[index % BLOCK], index + 1, missed + 1
        except Exception as error:  # some generators give up at a high level
            raise ConfigError(f"reasoning-gym cannot make entry {index} of {kind.name}: {one_line(error)}") from error
        question = entry["question"]
        digest = hashlib.sha256(question.encode()).digest()
        if digest[0] % 8 not in _SHARES.get(part, _TEST) or question in by_question:
            continue
        entry = _plain(entry)
        if kind.task in FENCES and not harmless(str(entry["answer"]), names=FENCES[kind.task]):
            continue  # The library's own answer has an integral, or is too long.
        label = repr({"task": kind.task, "parameters": kind.parameters, "entry": entry})
        if ast.literal_eval(label)["entry"] != entry:
            raise ConfigError(f"an entry of {kind.name} cannot be written as a literal")
        steps = digest[1] / 256 < kind.steps
        solution = worked.solution(kind.task, entry, steps=steps) if part in _SHARES else None
        by_question[question] = Problem(text=question, label=label, key=question, solution=solution)
        missed = 0
    return list(by_question.values())


def _plain(value: Any) -> Any:
    """The value in a form that a literal has: Python's own numbers instead of numpy's, and fractions as text."""
    match value:
        case dict():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(_plain, value))
        case np.generic():
            return value.item()
        case Fraction():
            return str(value)
    return value


def _training_kinds(kinds: Sequence[Kind], part: str) -> list[Kind]:
    return [kind for kind in kinds if kind.weight and (part != "warmup" or kind.task not in worked.WITHOUT_ANSWER)]


def _generate(kinds: Sequence[Kind], _generator: str, part: str, count: int, seed: int) -> Iterator[Problem]:
    benchmark = [kind for kind in kinds if kind.name == part]
    by_name = {kind.name: kind for kind in benchmark or _training_kinds(kinds, part)}
    generated: list[Problem] = []
    for name, number in shares(count, {name: kind.weight or 1.0 for name, kind in by_name.items()}).items():
        new = problems(by_name[name], part, number, seed)
        if len(new) < number:
            raise ConfigError(f"{number} problems of {name} are asked for; there are only {len(new)}")
        generated += new
    random.Random(f"{seed}/{part}").shuffle(generated)
    return iter(generated)


def tagged_prompt(problem: Problem) -> str:
    """The question, and the request for steps and an answer within tags."""
    return f"{problem.text}\nWrite your steps, then give the final answer within <answer> </answer>."


def question_prompt(problem: Problem) -> str:
    """Only the question, for a model that has learned the form of an answer in a warm-up."""
    return problem.text


# ------------------------------------------------------------------------------------------------------ verification


def answer(response: str) -> str | None:
    """The text of the last <answer>...</answer> of a response without blanks around it, or None."""
    before, closed, _ = speech(response).rpartition("</answer>")
    _, opened, text = before.rpartition("<answer>")
    return text.strip() if closed and opened and len(text) <= MAX_LENGTH else None


@functools.lru_cache(maxsize=64)
def _scorer(task: str, parameters: str) -> Any:
    return library().create_dataset(task, **ast.literal_eval(parameters), seed=0)


@functools.lru_cache(maxsize=64)
def _label(label: str) -> tuple[str, str, dict[str, Any]]:
    content = ast.literal_eval(label)
    return content["task"], repr(content["parameters"]), content["entry"]


def score(response: str, label: str) -> float:
    """r(x, y), within 0..1: the library's score of the answer; 0.0 if there is none, or if a fence stops it.

    A label that is not of this task, or of REFUSED, is a ValueError, and so is a score of the library outside 0..1.
    """
    try:
        task, parameters, entry = _label(label)
    except (SyntaxError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"label is {label!r:.80}; it must be one that `bapo-openrlhf prepare reasoning_gym` wrote"
        ) from None
    if task in REFUSED:
        raise ValueError(f"label has the task {task}; it is refused because {REFUSED[task]}")
    text = answer(response)
    if text is None or (task in FENCES and not harmless(text, names=FENCES[task])):
        return 0.0
    if task in MAY_BE_NAN and "nan" in text.lower():
        return 0.0
    try:
        value = float(_scorer(task, parameters).score_answer(text, entry))
    except Exception:  # Some of the library's functions cannot read each text.
        return 0.0
    if not -ROUNDING <= value <= 1 + ROUNDING:
        raise ValueError(f"the score of {task} is {value}; it must be within 0..1")
    return min(max(value, 0.0), 1.0)


def takes(label: Any) -> bool:
    """Whether the answer in a label has a score above 0. A label without one, whose answers are many, is taken."""
    try:
        own = _label(label)[2]["answer"]
        return own is None or score(f"<answer>{own}</answer>", label) > 0
    except (SyntaxError, ValueError, KeyError, TypeError):
        return False


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], responses: Sequence[str] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """OpenRLHF's reward function, in 0..1. "extra_logs" has "answered": 1.0 if there is an answer within tags."""
    texts = texts_of(queries, prompts, responses)
    rewards = [score(text, label) for text, label in zip(texts, labels, strict=True)]
    return verdict(rewards, answered=[float(answer(text) is not None) for text in texts])


# ---------------------------------------------------------------------------------------------------------- the task

_SOURCE = Source("the package reasoning-gym", ())


def task_of_kinds(tasks: str | None, config: Path | None) -> Task:
    """The task with the kinds that `--tasks` and `--config` name (`requested_kinds`), each also a benchmark."""
    if tasks is None and config is None:
        raise ConfigError("reasoning_gym needs --tasks NAME,... or --config FILE; it has no default")
    kinds = requested_kinds(tasks, config)
    if reserved := next((kind.name for kind in kinds if kind.name in ("train", "warmup", "test")), None):
        raise ConfigError(f"--tasks has {reserved}; the name stands for a part")
    names = {kind.name: Part(kind.name, _SOURCE) for kind in kinds}
    sizes = {"train": 1000, **dict.fromkeys(names, 100)}
    if _training_kinds(kinds, "warmup"):
        sizes["warmup"] = 500
    return dataclasses.replace(
        TASK,
        benchmarks=names,
        generate=functools.partial(_generate, kinds),
        sizes={f"reasoning-gym {VERSION}": sizes},
        kinds=repr(kinds),
    )


TASK = Task(
    name="reasoning_gym",
    file=Path(__file__),
    train=Part("reasoning-gym", _SOURCE),
    benchmarks={},
    prompts={"tagged": tagged_prompt, "question": question_prompt},
    takes=takes,
    configure=task_of_kinds,
)

if __name__ == "reward_func":  # A reward process loads the library with the file, so that no response pays for it.
    library()

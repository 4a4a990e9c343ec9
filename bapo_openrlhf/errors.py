"""The errors that a user sees, and what a number must be."""

import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

_PAGE = re.compile(r"https?://\S+$")  # a line that ends so
_INPUT = re.compile(r" \[type=\w+, input_value=.*\]$")  # of pydantic


class ConfigError(ValueError):
    """Bad input, found before a model loads if possible. The message has field, value and what is allowed."""


class RunError(RuntimeError):
    """A run that failed, after it had started: the step, the phase, and why."""


class Ended(SystemExit):
    """The end of a run that was "stopped" by a signal, "stalled", or "untrained": it ended, and trained nothing.

    It is no Exception, so that only the end of the process catches it. `code` is the status of the process.
    """

    code: int

    def __init__(self, how: str, code: int, text: str) -> None:
        super().__init__(code)
        self.how, self.text = how, text


def reason_of(error: BaseException | str) -> str:
    """The message of an error on one line, without a last line that leads to web pages, or what was given."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    while len(lines) > 1 and _PAGE.search(lines[-1]):
        del lines[-1]
    return " ".join(_INPUT.sub("", " ".join(lines)).split())


def one_line(error: BaseException) -> str:
    """The type and the message of an error on one line, with at most 300 characters of the message."""
    try:
        text = reason_of(error)[:300]
    except Exception:  # a class of the user's own may fail here
        text = "its message cannot be made"
    return f"{type(error).__name__}: {text}"


def not_checked(what: str, error: ModuleNotFoundError) -> str:
    """A warning in the place of a check that needs a package which this machine, such as a laptop, does not have."""
    return f"{what}: not all was checked, because {(error.name or '').partition('.')[0]} is not installed here"


NUMBERS: dict[str, str] = {"int": "a whole number", "float": "a number"}  # the types of flags, by their names
_WRONG_NUMBER = re.compile(r"argument (?:--)?(\S+): invalid (int|float) value: (.*)", re.DOTALL)  # argparse's message


def refuse(message: str) -> NoReturn:
    """Raise ConfigError, in the place of a parser's `error`, which would end the process."""
    if match := _WRONG_NUMBER.fullmatch(message):
        message = f"{match[1]} is {match[3]}; it must be {NUMBERS[match[2]]}"
    raise ConfigError(message)


# What a number must be, in the words of the error message. NaN is never allowed.
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "a number": lambda value: not math.isnan(value),
    "at least -1": lambda value: value >= -1,
    "at least 0": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "at least 1, or -1 for never": lambda value: value >= 1 or value == -1,
    "at least 2": lambda value: value >= 2,
    "at most 0": lambda value: value <= 0,
    "above 0": lambda value: value > 0,
    "above 1": lambda value: value > 1,
    "finite and at least 0": lambda value: 0 <= value < math.inf,
    "finite and above 0": lambda value: 0 < value < math.inf,
    "finite and at most 1": lambda value: -math.inf < value <= 1,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [-1, 1]": lambda value: -1 <= value <= 1,
    "in [0, 3]": lambda value: 0 <= value <= 3,
    "in [0, 10]": lambda value: 0 <= value <= 10,
    "in [0.01, 10]": lambda value: 0.01 <= value <= 10,
    "in [0, 4294967295]": lambda value: 0 <= value < 2**32,
}

"""The errors that a user sees."""

from typing import NoReturn


class ConfigError(ValueError):
    """Bad input, found before any model loads if it can be known by then.

    The message names the field, the value found and what is allowed.
    """


class RunError(RuntimeError):
    """A run that failed, after it had started: the step, the phase, and why."""


def one_line(error: BaseException) -> str:
    """The type and the message of an error on one line, with at most 300 characters of the message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def refuse(message: str) -> NoReturn:
    """Raise ConfigError, in the place of a parser's `error`, which would end the process."""
    raise ConfigError(message)

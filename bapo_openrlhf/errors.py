"""The errors that a user sees."""

from __future__ import annotations

from typing import NoReturn


class ConfigError(ValueError):
    """Bad input, found before any model loads if it can be known by then.

    The message names the field, the value found and what is allowed.
    """


class RunError(RuntimeError):
    """A run that failed, after it had started: the step, the phase, and why."""


def refuse(message: str) -> NoReturn:
    """Raise ConfigError, in the place of a parser's `error`, which would end the process."""
    raise ConfigError(message)

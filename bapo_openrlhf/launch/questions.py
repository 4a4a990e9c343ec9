"""A process that answers questions with libraries that take seconds to import, while this one looks at other things.

Imports of torch, transformers and vLLM stay out of this process, and so does what they would do to it. Code that a
model folder brings runs there, too.
"""

import os
from collections.abc import Hashable
from contextlib import suppress
from multiprocessing import get_context, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError, not_checked
from bapo_openrlhf.training.engine.reward_pool import status

# What this process has been answered already: a study checks each of its arms, and most have the same models.
ANSWERS: dict["Question", list[str]] = {}
QUIET = {  # an answer is all that the process says
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Question(Hashable, Protocol):
    """What can be asked. It travels to the process by pickle."""

    @property
    def about(self) -> str:
        """Flag and value. An error begins with them if the process dies."""

    def answer(self) -> list[str]:
        """Warnings. It runs in the process."""


class Questions:
    """Questions that are asked now and answered at the end. A context, which ends the process."""

    def __init__(self) -> None:
        self._asked: list[Question] = []
        self._child: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> "Questions":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None and self._pipe is not None:
            self._child.kill()
            self._child.join()
            self._pipe.close()

    def ask(self, question: Question) -> None:
        """Ask a question. The first one starts the process."""
        is_known = question in ANSWERS or question in self._asked
        self._asked.append(question)
        if is_known:
            return
        if self._pipe is None:
            context, python = get_context("spawn"), spawn.get_executable()
            self._pipe, other_end = context.Pipe()
            self._child = context.Process(target=_answer, args=(other_end,), daemon=True)
            spawn.set_executable(machine.python())  # which has imported the libraries already, if there is a server
            self._child.start()
            spawn.set_executable(python)
            other_end.close()
        with suppress(BrokenPipeError):  # it has died, which `answers` says
            self._pipe.send(question)

    def answers(self) -> list[str]:
        """The warnings of all questions, in their order, each once."""
        return list(dict.fromkeys(warning for question in self._asked for warning in self._answer_of(question)))

    def _answer_of(self, question: Question) -> list[str]:
        if question not in ANSWERS:
            assert self._pipe is not None and self._child is not None  # `ask` has made them
            try:
                refusal, answer = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                self._child.join()
                raise ConfigError(
                    f"{question.about}; a process that tried it ended ({status(self._child.exitcode or 0)})"
                ) from None
            if refusal:
                raise ConfigError(refusal)
            ANSWERS[question] = answer
        return ANSWERS[question]


def _answer(pipe: Connection) -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    with suppress(EOFError, BrokenPipeError):
        while True:
            question = pipe.recv()
            try:
                pipe.send((None, question.answer()))
            except ConfigError as error:
                pipe.send((str(error), []))
            except ModuleNotFoundError as error:
                pipe.send((None, [not_checked(question.about, error)]))

"""Make prompts of rows with OpenRLHF's own functions: input template, chat template and tokenizer."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.data.messages import left_out
from bapo_openrlhf.data.tokenizer import Tokenizer, another_day
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.host import module_of

THINK = "<think>"
# Each tokenizer on the hub has one of these files. One in a folder may also be an older one, such as spiece.model.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOKENIZER_NAME = re.compile(r".*tokenizer.*|(vocab|merges|tekken|byte_maps).*|.*\.(model|spm|tiktoken)")


def fill(content: Any, template: str | None, apply_chat_template: Callable[..., str] | None) -> str:
    """The prompt that OpenRLHF makes of a text or of messages. A chat template takes the place of an input template."""
    preprocess = module_of("datasets/prompts_dataset.py").preprocess_data
    return preprocess({"input": content}, template, "input", None, apply_chat_template)[0]


def local_tokenizer(model: str) -> str | None:
    """The folder of a model's tokenizer on this machine; None if it has none."""
    folder = Path(model)
    if folder.is_dir():
        files = (path.name for path in folder.iterdir() if path.is_file())
        return model if any(map(TOKENIZER_NAME.fullmatch, files)) else None
    from huggingface_hub import try_to_load_from_cache

    for file in TOKENIZER_FILES:
        if isinstance(cached := try_to_load_from_cache(model, file), str):
            return str(Path(cached).parent)
    return None


def check_tokenizer(flag: str, model: str) -> None:
    """Raise ConfigError if a model is a folder without a tokenizer.

    Without one, transformers makes a tokenizer of the name of the architecture in config.json. It has no vocabulary, so
    that each prompt is empty.
    """
    if Path(model).is_dir() and local_tokenizer(model) is None:
        raise ConfigError(
            f"{flag} is {model}; the folder has no tokenizer: copy the files of the model's tokenizer into it, such as "
            "tokenizer.json and tokenizer_config.json"
        )


class Renderer:
    """Makes prompts and counts their tokens as a run does. `tokenizer` is None if it is not on this machine."""

    def __init__(self, flag: str, model: str | None, *, template: str | None, chat: bool, fast: bool = True) -> None:
        """Load the tokenizer, unless it is not on this machine (no `model`). A ConfigError names `flag`."""
        self.tokenizer: Tokenizer | None = None
        self._template, self._chat = template, chat
        if model is None:
            return
        try:
            self.tokenizer = Tokenizer(model, fast)
            missing = chat and not self.tokenizer.has_chat_template()
        except Exception as error:  # transformers raises many kinds of errors for a bad folder
            why = "" if Path(model).is_dir() else machine.offline()
            raise ConfigError(f"{flag} is {model}; its tokenizer cannot be loaded{why}: {one_line(error)}") from error
        if missing:
            raise ConfigError(
                f"data.apply_chat_template is set, and {flag} is {model}, whose tokenizer has none; take a chat model, "
                "put a chat_template.jinja into the folder, or take data.input_template instead"
            )
        self._dated = chat and self.tokenizer.has_date()
        self._end = self.tokenizer.special().get("eos_token", "")
        self._start = None if chat else self.tokenizer.start()  # a chat template writes it if the model knows it

    @property
    def renders(self) -> bool:
        """Whether there is something to make of a row's text that can be made here."""
        return self.tokenizer is not None or (self._template is not None and not self._chat)

    def __call__(self, content: Any) -> str:
        """The prompt that a run makes of the content of a prompt column, or the Exception of a chat template."""
        chat = self.tokenizer.apply_chat_template if self._chat and self.tokenizer is not None else None
        if chat is None and self._template is None and isinstance(content, str):
            return content  # as OpenRLHF's function does, whose file imports torch
        return fill(content, self._template, chat)

    def doubts(self, content: Any, prompt: str) -> Iterator[tuple[str, str, str]]:
        """Kind, text and advice of what is seldom meant in a prompt, or the Exception of a chat template."""
        if self.tokenizer is None:
            return
        if self._chat and (message := left_out(content, prompt, self)) is not None:
            number, role = message
            text = f"the prompt does not depend on message {number} (role {role!r}), which the chat template leaves out"
            yield "left out", text, "Give it a role that the template knows, or a text as its content"
        if self._dated:
            render = partial(self.tokenizer.apply_chat_template, strftime_now=another_day)
            if fill(content, None, render) != prompt:
                text = "the chat template writes the date into the prompt (strftime_now)"
                advice = "Put a chat_template.jinja with a fixed date into the model's folder"
                follows = "so that a run that is resumed on another day has other prompts than its buffers"
                yield "dated", f"{text}, {follows}", advice
        if self._start is not None and not prompt.startswith(self._start):
            text = f"the prompt does not begin with {self._start}, which the tokenizer puts before a text, and a run"
            advice = f"Set data.input_template to {self._start + (self._template or '{}')!r}"
            yield "start", f"{text} does not", advice

    def wrong_solution(self, content: Any, prompt: str, solution: str) -> str | None:
        """What a worked solution has once too often after the prompt of a content; None if there is nothing."""
        if self.tokenizer is None:
            return None
        header = header_of(content, self.tokenizer.apply_chat_template) if self._chat else ""
        return wrong_response(prompt, solution, end=self._end, header=header)


def wrong_response(prompt: str, response: str, *, end: str, header: str) -> str | None:
    """What there is once too often in a worked solution that follows a prompt; None if there is nothing.

    The text must begin with the prompt that a run gives, and have the beginning of thinking, the end token (`end`) and
    the header of a response, which the chat template writes before each (`header`), once each. A template that opens
    thinking gives a second `<think>` to a solution that has one. A template that cuts thinking moves the text, so that
    a model learns its last words without a beginning.
    """
    opened = prompt.rstrip().endswith(THINK)
    if response.count(THINK) + opened > 1:
        return f"{THINK} twice" + (", because the prompt ends with one" if opened else "")
    if end and end in response.rstrip().removesuffix(end):
        return f"the end token {end} before its end"
    name = header.replace(THINK, "").strip()
    return f"the header of a response, {name!r}" if name and name in response else None


def header_of(content: Any, apply: Callable[..., str]) -> str:
    """What a chat template writes before a response to a prompt; "" if it writes nothing, or not at the end."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    without, prompt = (apply(messages, tokenize=False, add_generation_prompt=add) for add in (False, True))
    return prompt[len(without) :] if prompt.startswith(without) else ""

"""From a problem to what the model is asked: chat template and tokens, as OpenRLHF makes them for training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.evaluation.problems import Problem


@dataclass(frozen=True)
class Prompt:
    """What the model is asked.

    Attributes:
        text: with chat markup.
        token_ids: of the text, one placeholder for each image.
        images: paths.
        length: tokens that the model sees, those of the images included.
    """

    text: str
    token_ids: list[int]
    images: tuple[str, ...]
    length: int


def content(text: str) -> str | list[dict[str, str]]:
    """A user message's content: the text, or with <image> tags the list of its images and texts, texts stripped."""
    pieces = re.split("(<image>)", text)
    if len(pieces) == 1:
        return text
    parts = ({"type": "image"} if piece == "<image>" else {"type": "text", "text": piece.strip()} for piece in pieces)
    return [part for part in parts if part.get("text") != ""]


class Prompter:
    """Makes prompts with a model's own tokenizer, or its processor where there are images.

    Attributes:
        chat: whether the tokenizer's chat template is applied.
        note: what to tell the user, where a chat template was wanted and the tokenizer has none; else None.
        longest: tokens of prompt and response together that the model was made for; None where its configuration does
            not say.
    """

    def __init__(self, model: str, *, chat: bool | str, images: bool) -> None:
        """Load the tokenizer.

        Args:
            model: folder or hub name.
            chat: whether to apply the tokenizer's chat template, where it has one; or a template of one's own, as
                OpenRLHF's --data.input_template: the text goes where {} stands.
            images: whether any problem has images.

        Raises:
            ConfigError: it cannot be loaded, or images are asked about without a chat template.
        """
        cpu.prepare_environment()
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(model)
            self._processor: Any = (AutoProcessor if images else AutoTokenizer).from_pretrained(model)
        except Exception as error:  # whatever transformers finds wrong with the folder
            raise ConfigError(f"model is {model}; its tokenizer cannot be loaded: {_one_line(error)}") from error
        if images and not hasattr(self._processor, "image_processor"):
            raise ConfigError(f"model is {model}; the problems have images, and it takes none")
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self.longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        self._template = chat if isinstance(chat, str) else "{}"
        self.chat = chat is True and bool(self._processor.chat_template)
        if images and not self.chat:
            raise ConfigError(f"model is {model}; images are put into the prompt by a chat template, and none is used")
        has_none = chat is True and not self.chat
        self.note = "the tokenizer has no chat template: prompts are the text as it is" if has_none else None

    def __call__(self, problem: Problem) -> Prompt:
        """The prompt of one problem: one user message, and the opening of the answer."""
        text = problem.input
        if self.chat:
            messages = [{"role": "user", "content": content(text)}]
            text = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = self._template.replace("{}", text)
        # No special tokens: the template has put them where they belong.
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        length = len(token_ids)
        if problem.images:
            inputs = self._processor(text=[text], images=open_images(problem.images), add_special_tokens=False)
            length = len(inputs["input_ids"][0])
        return Prompt(text, token_ids, problem.images, length)


def open_images(paths: Sequence[str]) -> list[Any]:
    """Images as Pillow has them, in RGB.

    Raises:
        ConfigError: a file is no image.
    """
    from PIL import Image

    images = []
    for path in paths:
        try:
            images.append(Image.open(path).convert("RGB"))
        except OSError as error:
            raise ConfigError(f"image {path} cannot be read: {_one_line(error)}") from None
    return images


def _one_line(error: BaseException, most: int = 300) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"

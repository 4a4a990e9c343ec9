"""From a problem to the model's prompt and its tokens, as in training."""

import math
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.data.prompts import check_tokenizer, fill
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.launch.model_files import positions_of
from bapo_openrlhf.training.engine.pictures import pictures
from bapo_openrlhf.workbench.evaluation.problems import BenchmarkProblem


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in the form that vLLM gets."""

    text: str  # with chat markup
    token_ids: list[int]  # of the text, with one placeholder for each image
    images: tuple[str, ...]  # paths or addresses
    length: int  # tokens that the model sees, including those of the images


class Prompter:
    """Makes prompts with a model's own tokenizer, or with its processor if there are images.

    `chat` says whether the chat template is applied, and `note` that one was wanted and is not there. `longest` are the
    most tokens of prompt and response together, or None if the model does not say.
    """

    def __init__(self, model: str, *, chat: bool | str, images: bool) -> None:
        """Load the tokenizer; a ConfigError if none can make these prompts. `chat` may be a template with {}."""
        check_tokenizer("model", model)
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=True)  # as OpenRLHF
            kind = AutoProcessor if images else AutoTokenizer
            self._processor: Any = kind.from_pretrained(model, trust_remote_code=True)
        except Exception as error:  # transformers raises many kinds of errors for a bad folder.
            what = f"model is {model}; its tokenizer cannot be loaded{machine.offline()}"
            raise ConfigError(f"{what}: {one_line(error)}") from error
        if images and not hasattr(self._processor, "image_processor"):
            raise ConfigError(f"model is {model}; it takes no images, and the problems have some")
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        longest = positions_of(config.get_text_config().to_dict())
        self.longest = None if math.isinf(longest) else int(longest)
        self._template = chat if isinstance(chat, str) else None
        self.chat = chat is True and bool(self._processor.chat_template)
        if images and not self.chat:
            raise ConfigError(f"model is {model}; a prompt with images needs a chat template, and none is used")
        has_none = chat is True and not self.chat
        self.note = "the tokenizer has no chat template: prompts are the text as it is" if has_none else None

    def __call__(self, problem: BenchmarkProblem) -> EncodedPrompt:
        """The prompt of one problem, made by OpenRLHF's function, which also makes those of training."""
        if not self.chat and not isinstance(problem.input, str):
            raise ConfigError(f"problem {problem.id}: the prompt is a list of messages, which needs a chat template")
        text = fill(problem.input, self._template, self._processor.apply_chat_template if self.chat else None)
        # The template has already added special tokens.
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        length = len(token_ids)
        if problem.images:
            try:
                seen = pictures(list(problem.images))
            except ValueError as error:
                raise ConfigError(f"problem {problem.id}: {error}") from None
            inputs = self._processor(text=[text], images=seen, add_special_tokens=False)
            length = len(inputs["input_ids"][0])
        return EncodedPrompt(text, token_ids, problem.images, length)

"""The tokenizer of a run's model."""

import json
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from bapo_openrlhf.errors import one_line
from bapo_openrlhf.training.engine.pictures import pictures


class Measured(NamedTuple):
    """What the tokens of a prompt are."""

    length: int  # how many there are, with those of its images
    is_found: bool  # whether the prompt stays in the text of its tokens
    refusal: str  # what the processor says of images that it refuses
    unknown: int  # how many stand for what the tokenizer does not know
    beyond: str | None  # what is wrong with a token that has no embedding in the model


class Tokenizer:
    """The tokenizer that OpenRLHF loads (`get_tokenizer`); of a model with vision, that of its processor."""

    def __init__(self, model: str, fast: bool) -> None:
        """Load that of a folder or a hub name, which may be in Rust if it is `fast`. A damaged one is an Exception."""
        import transformers

        kind = transformers.AutoProcessor if has_vision(model) else transformers.AutoTokenizer
        self._loaded: Any = kind.from_pretrained(model, trust_remote_code=True, use_fast=fast)
        self._tokenizer: Any = getattr(self._loaded, "tokenizer", self._loaded)
        config = _local_config(model) or {}
        text = config.get("text_config") or config
        self._vocab_size: int | None = text.get("vocab_size")
        # As vLLM, which reads config.json only if there is no generation_config.json. A model of the hub has one.
        generation = _local_config(model, "generation_config.json") or text
        self._ends = not config or generation.get("eos_token_id") is not None
        self._sees = hasattr(self._loaded, "image_processor")
        self._added: dict[tuple[tuple[int, int], ...], int] = {}  # tokens, by the sizes of a prompt's images
        self._images = {config.get(name) for name in ("image_token_id", "image_token_index")}  # images replace it

    def has_chat_template(self) -> bool:
        return bool(self._loaded.chat_template)

    def has_date(self) -> bool:
        """Whether its chat template may write the date."""
        return "strftime_now" in str(self._loaded.chat_template)

    def start(self) -> str | None:
        """The token that it puts before a text if it is asked to; None if there is none, or if it cannot be written."""
        token, number = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        if token is None or self._tokenizer("1")["input_ids"][:1] != [number]:
            return None
        (ids,) = self._ids([f"{token}1"])
        return token if ids[:1] == [number] and ids.count(number) == 1 else None

    def image_token(self) -> str | None:
        """The text that stands for an image in a prompt; None if the model reads no images."""
        return None if self._loaded is self._tokenizer else getattr(self._loaded, "image_token", None)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        """The text of messages. If the template refuses them, it raises an Exception."""
        return self._loaded.apply_chat_template(messages, **options)

    def special(self) -> dict[str, str]:
        """Its end token and its padding token by their names, as far as it has them."""
        kinds = ("eos_token", "pad_token")
        return {kind: token for kind in kinds if (token := getattr(self._tokenizer, kind)) is not None}

    def ends(self) -> bool:
        """Whether there is a token that ends a response: its own, or one of the model's."""
        return self._tokenizer.eos_token is not None or self._ends

    def lengths(self, texts: list[str]) -> list[int]:
        """The number of tokens of each text."""
        return list(map(len, self._ids(texts)))

    def measured(self, prompts: list[tuple[str, Any]], most: int) -> list[Measured]:
        """What the tokens of each prompt with its images are.

        Their text is what a reward function gets: of all tokens of images, and only of the last `most` of the others.
        """
        result, unknown = [], self._tokenizer.unk_token_id
        for (text, images), ids in zip(prompts, self._ids([text for text, _ in prompts]), strict=True):
            is_kept = text in self._tokenizer.decode(ids[-most:], skip_special_tokens=False)
            image_tokens, refusal = self._of_images(text, images, len(ids)) if images and self._sees else (0, "")
            count = 0 if unknown is None else ids.count(unknown)
            found = is_kept and not image_tokens
            result.append(Measured(len(ids) + image_tokens, found, refusal, count, self._beyond(ids)))
        return result

    def _of_images(self, text: str, images: Any, text_tokens: int) -> tuple[int, str]:
        """How many tokens images add to a prompt whose text has `text_tokens`, and what is wrong with them."""
        try:
            opened_images = pictures(images)
            sizes = tuple(image.size for image in opened_images)
            if sizes not in self._added:
                ids = self._loaded(text=[text], images=opened_images, add_special_tokens=False)["input_ids"]
                self._added[sizes] = len(ids[0]) - text_tokens
            return self._added[sizes], ""
        except Exception as error:  # a processor raises what it likes
            return 0, one_line(error)

    def beyond(self, texts: list[str]) -> list[str | None]:
        """What is wrong with each text that has a token without an embedding in the model, by its local config.json."""
        return [self._beyond(ids) for ids in self._ids(texts)]

    def _beyond(self, ids: list[int]) -> str | None:
        size = self._vocab_size
        if size is None or self._highest < size:
            return None
        token = max(set(ids) - self._images, default=0)
        if token < size:
            return None
        return (
            f"has the token {self._tokenizer.convert_ids_to_tokens(token)!r} with the id {token}; each id must be "
            f"below {size}, the vocab_size in the model's config.json"
        )

    @cached_property
    def _highest(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=0)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:  # it would raise an error
            return []
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def lengths_with_end(self, texts: list[str]) -> list[int]:
        """The number of tokens of each text and the end token, which is added unless the text ends with it."""
        end = self._tokenizer.eos_token
        return self.lengths([text if text.endswith(end) else text + end for text in texts])


def another_day(form: str) -> str:
    """A date that is not of this day, as a chat template asks for it (strftime_now)."""
    return datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC).strftime(form)


def _local_config(model: str, name: str = "config.json") -> dict[str, Any] | None:
    file = Path(model) / name
    return json.loads(file.read_text()) if file.is_file() else None


def has_vision(model: str) -> bool:
    """Whether a model reads images, by its config.json. A hub name is looked up as OpenRLHF does."""
    config = _local_config(model)
    if config is not None:
        return "vision_config" in config
    if Path(model).is_dir():
        return False
    from transformers import AutoConfig

    try:
        return hasattr(AutoConfig.from_pretrained(model, trust_remote_code=True), "vision_config")
    except Exception:  # as OpenRLHF: what has no config that can be read has no vision
        return False

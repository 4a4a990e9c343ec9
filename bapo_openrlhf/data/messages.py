"""The form of a prompt: a text, or a list of messages for a chat template."""

import ast
import json
from collections.abc import Callable
from typing import Any

TYPED_BY_ROW = ("json", "csv")  # what reads such files gives each object its own keys


def wrong_prompt(content: Any, *, chat: bool) -> str | None:
    """What is wrong with the form of a prompt; None if it is a text, or messages with a chat template."""
    if isinstance(content, str):
        return None if content.strip() else "it must be a text that is not empty"
    if not isinstance(content, list):
        return "it must be a text" + (" or a list of messages" if chat else "")
    if not chat:
        return "it is a list of messages, which needs data.apply_chat_template; otherwise it must be a text"
    if not content or not all(_is_message(message) for message in content):
        return (
            "each message must have a role and a content, as in {'role': 'user', 'content': '1 + 1?'}, and a part of "
            "the type text must have a text"
        )
    contents = [message["content"] for message in content if message["role"] == "user"]
    if contents and all(part["type"] == "text" and not part["text"].strip() for part in _parts(contents[-1])):
        return "the last message of the user must have a text that is not empty"
    return None


def is_text_of_messages(content: Any) -> bool:
    """Whether a prompt is a text with messages in JSON or Python."""
    if not isinstance(content, str) or not content.lstrip().startswith("["):
        return False
    try:
        try:
            messages = json.loads(content)
        except ValueError:
            messages = ast.literal_eval(content.strip())
        return wrong_prompt(messages, chat=True) is None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def left_out(content: Any, prompt: str, render: Callable[[Any], str]) -> tuple[int, str] | None:
    """Number and role of the first message that changes nothing in `prompt`; None if there is none.

    `render` is asked only if a text is not in the prompt, because a template may change one.
    """
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    for number, message in enumerate(messages, 1):
        parts = _parts(message.get("content"))
        texts = [part["text"].strip() for part in parts if part["type"] == "text"]
        if message["role"] == "assistant" or all(text in prompt for text in texts):
            continue  # templates leave out earlier thinking
        others = [part | {"text": f"x{part['text']}x"} if part["type"] == "text" else part for part in parts]
        other = others if isinstance(message["content"], list) else others[0]["text"]
        if render([*messages[: number - 1], message | {"content": other}, *messages[number:]]) == prompt:
            return number, message["role"]
    return None


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        return all(map(_is_part, content))
    if content is None and role != "user":  # a message may have only calls of tools
        return any(_is_filled(value) for key, value in message.items() if key != "role")
    return isinstance(content, str)


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or "type" not in part:
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def _is_filled(value: Any) -> bool:
    """Whether a value has more than nulls. A file with types gives each message the keys of all."""
    if isinstance(value, dict):
        value = [*value.values()]
    return any(map(_is_filled, value)) if isinstance(value, list) else bool(value)


def _parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def as_written(rows: Any) -> Any:
    """A `datasets.Dataset`, with messages as their rows wrote them.

    A file with types, such as Parquet, fills the keys of other rows with null, which a chat template would write.
    """
    kinds = ((name, getattr(kind, "feature", None)) for name, kind in rows.features.items())
    columns = [name for name, kind in kinds if isinstance(kind, dict) and "role" in kind]
    if not columns or rows.info.builder_name in TYPED_BY_ROW:
        return rows
    return rows.with_transform(
        lambda block: {
            name: [_without_null(value) for value in values] if name in columns else values
            for name, values in block.items()
        }
    )


def _without_null(value: Any, kept: str = "content") -> Any:
    if isinstance(value, list):
        return [_without_null(one, kept) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_null(one, "") for key, one in value.items() if one is not None or key == kept}

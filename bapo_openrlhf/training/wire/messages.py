"""Messages as their rows wrote them.

A file with types, such as Parquet, gives each object the keys of all rows, with null for those that its own row has not
written. A chat template would write them, as in a call of a tool with an argument that nobody gave.
"""

from collections.abc import Callable, Container
from functools import wraps
from typing import Any

TEXTS = ("json", "csv")  # what reads them gives each object its own keys


def blending(function: Callable[..., Any], columns: Container[str | None]) -> Callable[..., Any]:
    """OpenRLHF's `blending_datasets`, with messages in these columns as their rows wrote them."""

    @wraps(function)
    def blended(*args: Any, **kwargs: Any) -> Any:
        rows = function(*args, **kwargs)
        kinds = rows.features.items()
        typed = [name for name, kind in kinds if name in columns and isinstance(getattr(kind, "feature", None), dict)]
        if not typed or rows.info.builder_name in TEXTS:
            return rows
        return rows.with_transform(
            lambda block: {
                name: [_messages(value) for value in values] if name in typed else values
                for name, values in block.items()
            }
        )

    return blended


def _messages(value: Any) -> Any:
    """A list of messages without the keys that are null; the content, which each message has, stays."""
    if not isinstance(value, list):
        return value
    return [
        {key: _written(one) for key, one in message.items() if one is not None or key == "content"}
        if isinstance(message, dict)
        else message
        for message in value
    ]


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _written(one) for key, one in value.items() if one is not None}
    return [_written(one) for one in value] if isinstance(value, list) else value

"""Which sampled answers a run keeps: those of prompts that failed, and those of prompts that were solved later."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

GAP = " ... "  # replaces the middle of a response that is too long


class PromptStates:
    """Which prompts have failed and which were solved later, so that each is reported once: also after a resume."""

    def __init__(self, answers: Iterable[Mapping[str, Any]] = ()) -> None:
        self._told = {(row["kind"], row["prompt"]) for row in answers}

    def news(self, prompt: str, mean: Fraction | None) -> str | None:
        """What a group of this mean reward newly shows of its prompt (Prompt.id): "failed", "solved" or None."""
        if mean == 0:
            kind = "failed"
        elif mean is not None and mean > 0 and ("failed", prompt) in self._told:
            kind = "solved"
        else:
            return None
        if (kind, prompt) in self._told:
            return None
        self._told.add((kind, prompt))
        return kind


def shortened(text: str, chars: int) -> str:
    """`text` in at most `chars` characters. Its beginning and its end stay, because the answer is at the end."""
    if len(text) <= chars:
        return text
    kept = max(chars - len(GAP), 0)
    end = kept // 2
    return (text[: kept - end] + GAP + text[len(text) - end :])[:chars]

"""Which sampled answers a run keeps: of prompts that failed, and of those that were solved after that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

GAP = " ... "  # stands for the middle of a response that is too long


class PromptStates:
    """Which prompts have failed and which were solved after that, so that each is told once.

    Args:
        answers: what the run has kept so far (`record.read_answers`).
    """

    def __init__(self, answers: Iterable[Mapping[str, Any]] = ()) -> None:
        self._told = {(row["kind"], row["prompt"]) for row in answers}

    def news(self, prompt: str, mean: Fraction | None) -> str | None:
        """What a group tells of its prompt for the first time.

        Args:
            prompt: Prompt.id.
            mean: group mean reward; None where the group has none.

        Returns:
            failed: it is 0. solved: it is above 0, and the prompt has failed before. None otherwise.
        """
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
    """`text` in at most `chars` characters: its beginning and its end, where the answer is."""
    if len(text) <= chars:
        return text
    kept = max(chars - len(GAP), 0)
    end = kept // 2
    return (text[: kept - end] + GAP + text[len(text) - end :])[:chars]

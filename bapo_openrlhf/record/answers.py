"""Which sampled answers a run keeps: those of prompts that failed, and those of prompts that were solved later."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

GAP = " ... "  # replaces the middle of a response that is too long


class PromptStates:
    """Which prompts have failed and which were solved later, so that each is reported once.

    Args:
        answers: The rows that the run has kept so far (`run_record.read_answers`).
    """

    def __init__(self, answers: Iterable[Mapping[str, Any]] = ()) -> None:
        self._told = {(row["kind"], row["prompt"]) for row in answers}

    def news(self, prompt: str, mean: Fraction | None) -> str | None:
        """What a group shows about its prompt for the first time.

        Args:
            prompt: Prompt.id.
            mean: Group mean reward. None if the group has none.

        Returns:
            "failed" if the mean is 0 for the first time, "solved" if it is above 0 for the first time after a failure,
            and None otherwise.
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
    """`text` in at most `chars` characters. Its beginning and its end stay, because the answer is at the end."""
    if len(text) <= chars:
        return text
    kept = max(chars - len(GAP), 0)
    end = kept // 2
    return (text[: kept - end] + GAP + text[len(text) - end :])[:chars]

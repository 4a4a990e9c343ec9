"""What a step generated, for the record: from OpenRLHF's samples, so of every group, whatever becomes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.group import Prompt, exact_reward
from bapo_openrlhf.record.answers import PromptStates, shortened
from bapo_openrlhf.training.samples import prompt_of


@dataclass(frozen=True)
class GeneratedGroup:
    """The samples of one prompt.

    Attributes:
        uid: as that of the layer's `Group`.
        source: fresh or reevaluated.
        prompt: the prompt.
        samples: its G samples.
        mean: exact group mean reward; None for a group that cannot be used.
    """

    uid: int
    source: str
    prompt: Prompt
    samples: Sequence[Experience]
    mean: Fraction | None

    @cached_property
    def tokens(self) -> int:
        """Generated tokens of all responses."""
        return sum(int(sample.action_mask.sum()) for sample in self.samples)

    def row(self, state: str) -> dict[str, Any]:
        """Its line of groups.jsonl."""
        return {
            "uid": self.uid,
            "prompt": self.prompt.id,
            "source": self.source,
            "state": state,
            "mean": None if self.mean is None else float(self.mean),
            "responses": len(self.samples),
            "tokens": self.tokens,
        }


def generated_groups(
    samples: Sequence[Experience],
    size: int,
    *,
    source: str,
    first_uid: int,
    usable: Callable[[Experience], bool],
) -> list[GeneratedGroup]:
    """The samples of one rollout as groups, numbered as `groups_of` numbers the usable ones; the others come after."""
    chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
    whole = [all(map(usable, chunk)) for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda index: not whole[index])
    return [
        GeneratedGroup(
            uid=first_uid + number,
            source=source,
            prompt=prompt_of(chunks[index][0]),
            samples=chunks[index],
            mean=_mean(chunks[index]) if whole[index] else None,
        )
        for number, index in enumerate(order)
    ]


def filter_reasons(groups: Sequence[GeneratedGroup]) -> dict[str, int]:
    """Why dynamic filtering dropped these groups, as `monitor.composition` has it for the fresh filter."""
    equal = [g for g in groups if g.mean is not None and len({float(sample.rewards[0]) for sample in g.samples}) == 1]
    right = sum(group.mean >= 1 for group in equal if group.mean is not None)
    return {
        "filtered/none_right": len(equal) - right,
        "filtered/all_right": right,
        "filtered/by_draw": len(groups) - len(equal),
    }


def answers_of(groups: Sequence[GeneratedGroup], prompts: PromptStates, tokenizer: Any, chars: int) -> list[dict]:
    """Lines of answers.jsonl: a response of each prompt that failed first, the best one of each that is newly solved.

    Only these responses are decoded.

    Args:
        chars: most characters of a response.
    """
    rows = []
    for group in groups:
        kind = prompts.news(group.prompt.id, group.mean)
        if kind is None:
            continue
        sample = max(group.samples, key=lambda sample: float(sample.rewards[0]))  # the first of equal ones
        row = {"prompt": group.prompt.id, "kind": kind, "text": group.prompt.text, "label": str(group.prompt.label)}
        response = shortened(_response_text(sample, tokenizer), chars)
        rows.append(row | {"response": response, "reward": float(sample.rewards[0])})
    return rows


def has_reward(sample: Experience) -> bool:
    """Whether a sample has a finite reward; OpenRLHF gives none where a reward model is to judge it."""
    return sample.rewards is not None and math.isfinite(sample.rewards[0])


def _mean(samples: Sequence[Experience]) -> Fraction:
    return sum((exact_reward(sample.rewards[0]) for sample in samples), Fraction(0)) / len(samples)


def _response_text(sample: Experience, tokenizer: Any) -> str:
    """From the first generated token to the last, what was said between the turns included."""
    places = sample.action_mask[0].nonzero().flatten().tolist()  # place i speaks of token i + 1
    tokens = sample.sequences[0][places[0] + 1 : places[-1] + 2] if places else sample.sequences[0][:0]
    return tokenizer.decode(tokens, skip_special_tokens=True)

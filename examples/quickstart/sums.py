"""The task of the quickstart: sums with their steps. The answer to `7+5-8+6:` is `7+5=12 12-8=4 4+6=10`.

The file is also the reward file: `--reward.remote_url examples/quickstart/sums.py`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TERMS = {"four_terms": 4, "five_terms": 5, "six_terms": 6}
HELD_OUT = 100  # problems of each of TERMS that no run trains on, and no model is taught
RESULT = re.compile(r"=(-?\d+)")


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], responses: list[str], **kwargs: Any
) -> dict[str, Any]:
    """1 for each response whose last result is the label, and 0 for the others."""
    right = [float(RESULT.findall(text)[-1:] == [label]) for text, label in zip(responses, labels, strict=True)]
    return {"rewards": right, "scores": right, "extra_logs": {}}


class Sum(NamedTuple):
    """A sum: its first number, and the steps, each a sign and a number."""

    first: int
    steps: list[tuple[str, int]]

    @property
    def prompt(self) -> str:
        """What the model is asked."""
        return f"{self.first}{''.join(f'{sign}{number}' for sign, number in self.steps)}:"

    @property
    def is_held_out(self) -> bool:
        """Whether it is for evaluations only: one in eight is, and which ones follows from their text."""
        return hashlib.sha256(self.prompt.encode()).digest()[0] % 8 == 0

    def results(self, slip: float = 0.0, rng: random.Random | None = None) -> list[int]:
        """The result of each step.

        Args:
            slip: Probability that a step that crosses a multiple of ten is one too small. Later steps go on with what
                it gives, so a sum is the harder the more tens it crosses.
            rng: Draws the slips, if there are some.
        """
        results, before = [], self.first
        for sign, number in self.steps:
            after = before + int(f"{sign}{number}")
            if rng is not None and before // 10 != after // 10 and rng.random() < slip:
                after -= 1
            results.append(after)
            before = after
        return results

    def worked(self, results: list[int]) -> str:
        """The answer with its steps, if each step has these results."""
        begun = [self.first, *results]
        steps = zip(begun, self.steps, results, strict=False)
        return " ".join(f"{before}{sign}{number}={after}" for before, (sign, number), after in steps)


def draw(rng: random.Random, terms: int) -> Sum:
    """A sum of numbers of one digit."""
    return Sum(rng.randint(1, 9), [(rng.choice("+-"), rng.randint(1, 9)) for _ in range(terms - 1)])


def problems(seed: int, terms: int, held_out: bool) -> Iterator[Sum]:
    """Different sums without end, either those for evaluations or the others."""
    rng, seen = random.Random(f"{seed} {terms} {held_out}"), set[str]()
    while True:
        one = draw(rng, terms)
        if one.is_held_out == held_out and one.prompt not in seen:
            seen.add(one.prompt)
            yield one


def write(folder: Path, prompts: int) -> None:
    """Write train.jsonl, with as many sums of each of TERMS, and held_out.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (("train", -(-prompts // len(TERMS)), False), ("held_out", HELD_OUT, True)):
        streams = [problems(0, terms, held_out) for terms in TERMS.values()]
        rows = [next(stream) for _ in range(count) for stream in streams]
        rows = rows if held_out else rows[:prompts]
        lines = [json.dumps({"input": one.prompt, "label": str(one.results()[-1])}) + "\n" for one in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

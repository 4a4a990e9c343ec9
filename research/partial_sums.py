"""Partial credit for worked sums (decision_design.md, critic_design.md): 1/2 for the share of right steps, 1/2 for the
answer.

    python research/partial_sums.py   # marks the labels of SOURCES, as far as these are there

It is the reward file of these runs. Only problems with a mark in their label have partial credit, so evaluations still
measure the share of right answers.
"""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_openrlhf.tasks import reasoning_gym, worked
from bapo_openrlhf.tasks.task import vector

MARK = "partial credit: "
FOLDER = Path("runs") / "partial_sums"
SOURCES = {
    "train.jsonl": Path("runs/reasoning_gym/train.jsonl"),
    "seven.jsonl": Path("runs/seven_sums/train.jsonl"),
    "mixed.jsonl": Path("runs/mixed_terms/train.jsonl"),
}


def right_steps(response: str, expression: str) -> float:
    """Share of the steps of an expression, such as "8 + 5 = 13", that a response has in any order."""
    steps = worked.calculation(expression)
    return sum(bool(re.search(rf"(?<!\d){re.escape(step)}(?!\d)", response)) for step in steps) / len(steps)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **kwargs: Any) -> dict[str, Any]:
    """OpenRLHF's reward function; `labels` are those of reasoning_gym, with MARK before them or without."""
    plain = [label.removeprefix(MARK) for label in labels]
    result = reasoning_gym.reward_func(queries, prompts, plain, **kwargs)
    rewards = [float(reward) for reward in result["rewards"]]
    for place, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True)):
        if label.startswith(MARK):
            expression = ast.literal_eval(plain[place])["entry"]["metadata"]["expression"]
            rewards[place] = (rewards[place] + right_steps(query.split(prompt, 1)[-1], expression)) / 2
    return {**result, "rewards": vector(rewards), "scores": vector(rewards)}


def marked(line: str) -> str:
    """A line of a JSONL file with the mark in its label."""
    row = json.loads(line)
    return json.dumps({**row, "label": MARK + row["label"]}) + "\n"


def main() -> int:
    """Write the marked files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    there = {name: source for name, source in SOURCES.items() if source.is_file()}
    for name, source in there.items():
        with source.open(encoding="utf-8") as file:
            (FOLDER / name).write_text("".join(map(marked, file)), encoding="utf-8")
    print(f"{FOLDER}: {', '.join(there)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

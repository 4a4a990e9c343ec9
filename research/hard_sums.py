"""Hard training data for the map (study_design.md): of the sums in a file, those with many steps that may slip.

python research/hard_sums.py  # runs/hard_sums/train.jsonl, which research/steps/hard.yaml makes, to hardest.jsonl

The base model of `--size steps` slips in a step that crosses a multiple of ten. Of the prompts that cross five or more,
nine in ten have 0 of 8 right responses at first.
"""

import json
import re
from itertools import accumulate, pairwise
from pathlib import Path

FOLDER = Path("runs") / "hard_sums"
LEAST = 5  # tens that a hard sum crosses
PROMPTS = 512


def tens_crossed(question: str) -> int:
    """How many steps of a sum, from left to right, cross a multiple of ten: 8 + 5, 12 - 4 and 3 - 7 do."""
    _, expression = question.split(":")
    numbers = [int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", expression)]
    return sum(before // 10 != after // 10 for before, after in pairwise(accumulate(numbers)))


def main() -> int:
    """Write the first PROMPTS hard sums."""
    with (FOLDER / "train.jsonl").open(encoding="utf-8") as file:
        hard = [line for line in file if tens_crossed(json.loads(line)["input"]) >= LEAST]
    (FOLDER / "hardest.jsonl").write_text("".join(hard[:PROMPTS]), encoding="utf-8")
    print(f"{FOLDER / 'hardest.jsonl'}: {min(len(hard), PROMPTS)} of {len(hard)} hard sums")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

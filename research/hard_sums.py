"""Hard training data (study_design.md): of the sums in a file, those with many steps that may slip.

python research/hard_sums.py  # of runs/hard_sums/train.jsonl, which research/steps/hard.yaml makes

hardest.jsonl has the training data of the map. trained.jsonl has the first of these problems, for part 2 of
decision_design.md. It is a file of its own, because `--data.max_samples` would also cut the held-out problems.


The base model of `--size steps` slips in a step that crosses a multiple of ten. Of the prompts that cross five or more,
nine in ten have 0 of 8 right responses at first.
"""

import json
import re
from itertools import accumulate, pairwise
from pathlib import Path

FOLDER = Path("runs") / "hard_sums"
LEAST = 5  # tens that a hard sum crosses
PROMPTS, TRAINED = 512, 128  # of hardest.jsonl, and of trained.jsonl


def tens_crossed(question: str) -> int:
    """How many steps of a sum, from left to right, cross a multiple of ten: 8 + 5, 12 - 4 and 3 - 7 do."""
    _, expression = question.split(":")
    numbers = [int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", expression)]
    return sum(before // 10 != after // 10 for before, after in pairwise(accumulate(numbers)))


def main() -> int:
    """Write the first hard sums."""
    with (FOLDER / "train.jsonl").open(encoding="utf-8") as file:
        hard = [line for line in file if tens_crossed(json.loads(line)["input"]) >= LEAST]
    for name, count in (("hardest", PROMPTS), ("trained", TRAINED)):
        (FOLDER / f"{name}.jsonl").write_text("".join(hard[:count]), encoding="utf-8")
    print(f"{FOLDER / 'hardest.jsonl'}: {min(len(hard), PROMPTS)} of {len(hard)} hard sums")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The prompts of fair_trial_design.md that are not the first 512 of the quickstart's training data.

mixed.jsonl has 256 of these 512: the first 128 that the base model has right in none of 8 responses, and the first 128
of the others. few.jsonl has the first 256. Each is a file of its own, because `--data.max_samples` would also cut the
held-out problems. The base model is asked once, and its counts are kept in results/fair/base.csv. So each machine has
the same prompts.

    python research/mixed_sums.py  # writes runs/mixed_sums/, and results/fair/base.csv unless it is there
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from folders import RESULTS, ROOT
from hard_prompts import count_base

POOL, RESPONSES, OF_EACH = 512, 8, 128  # prompts that are asked, responses to each, and prompts of each kind
COUNTS = RESULTS / "fair" / "base.csv"


def write_counts(root: Path) -> None:
    """Count the base model's right responses, unless that has been done."""
    count_base(root, COUNTS, "reasoning_gym/train", "mixed_base", responses=RESPONSES, limit=POOL)


def mixed(prompts: Sequence[str], counts: Mapping[str, int]) -> set[str]:
    """The first OF_EACH prompts of which no response was right, and the first OF_EACH of which one was.

    Args:
        prompts: In the order of the training data.
        counts: How many responses of the base model were right.

    Raises:
        ValueError: There are fewer of a kind, or a prompt was not asked.
    """
    if unknown := [prompt for prompt in prompts if prompt not in counts]:
        raise ValueError(f"{COUNTS} lacks {len(unknown)} of the prompts; the first one is: {unknown[0]}")
    none = [prompt for prompt in prompts if counts[prompt] == 0][:OF_EACH]
    some = [prompt for prompt in prompts if counts[prompt] > 0][:OF_EACH]
    if len(none) < OF_EACH or len(some) < OF_EACH:
        raise ValueError(f"{len(none)} prompts at 0 and {len(some)} above; {OF_EACH} of each are needed")
    return {*none, *some}


def main() -> int:
    """Write both files of prompts."""
    write_counts(ROOT)
    with (ROOT / "runs" / "reasoning_gym" / "train.jsonl").open(encoding="utf-8") as file:
        lines = {json.loads(line)["input"]: line for line in list(file)[:POOL]}
    counts = {row.input: int(row.right) for row in pd.read_csv(COUNTS).itertuples()}
    chosen = mixed(list(lines), counts)
    folder = ROOT / "runs" / "mixed_sums"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mixed.jsonl").write_text("".join(line for prompt, line in lines.items() if prompt in chosen))
    (folder / "few.jsonl").write_text("".join(list(lines.values())[: 2 * OF_EACH]))
    print(f"{len(chosen)} prompts, of {len(counts)} of which {sum(not count for count in counts.values())} were at 0")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

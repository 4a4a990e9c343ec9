"""Writes traces for Countdown: the solution that a search finds for each problem, as another model's response.

python examples/traces/countdown.py runs/data/train.jsonl runs/data/traces.jsonl
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from bapo_openrlhf.tasks import countdown
from bapo_openrlhf.tasks.countdown import Term


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression that uses each number once and reaches the target. None means that none was found.

    All partial values are positive integers, as in generated problems. So this may miss the only solution of a
    published problem.
    """
    return search([Term(number, str(number), 3) for number in numbers], target)


def search(terms: Sequence[Term], target: int) -> str | None:
    """The solution that joins two terms after another until one is left."""
    if len(terms) == 1:
        return terms[0].text if terms[0].value == target else None
    for i, j in itertools.permutations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for op in "+-*/":
            joined = countdown.join(terms[i], op, terms[j])
            found = joined and search([*rest, joined], target)
            if found:
                return found
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("data", type=Path, help="problems, as `bapo-openrlhf prepare countdown` writes them")
    parser.add_argument("out", type=Path, help="the file to write")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.data.read_text().splitlines()]
    traces = {}
    for row in rows:
        solution = solve(*countdown.parse_problem(row["label"]))
        if solution is not None:
            # The quickstart's model answers with the bare expression; a language model puts it in tags.
            short = row["input"].endswith("=")
            traces[row["input"]] = solution if short else f"<answer>{solution}</answer>"
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in traces.items()]
    given.out.write_text("".join(line + "\n" for line in lines))
    print(f"{given.out}: {len(traces)} traces for {len(rows)} problems")


if __name__ == "__main__":
    main()

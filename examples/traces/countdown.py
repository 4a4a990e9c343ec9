"""Writes traces for Countdown: the solution that a search finds for each problem, as another model's response.

python examples/traces/countdown.py runs/data/train.jsonl runs/data/traces.jsonl
"""

import argparse
import json
from pathlib import Path

from bapo_openrlhf.tasks import countdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("data", type=Path, help="problems, as `bapo-openrlhf prepare countdown` writes them")
    parser.add_argument("out", type=Path, help="the file to write")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.data.read_text().splitlines()]
    traces = {}
    for row in rows:
        solution = countdown.solve(*countdown.parse_problem(row["label"]))
        if solution is not None:
            # The quickstart's model answers with the bare expression; a language model puts it in tags.
            short = row["input"].endswith("=")
            traces[row["input"]] = solution if short else f"<answer>{solution}</answer>"
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in traces.items()]
    given.out.write_text("".join(line + "\n" for line in lines))
    print(f"{given.out}: {len(traces)} traces for {len(rows)} problems")


if __name__ == "__main__":
    main()

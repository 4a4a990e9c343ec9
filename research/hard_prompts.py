"""Part 2 of decision_design.md: which problems the base model never solves, and how many of them a trained model does.

A problem is *never solved* if none of BASE responses of the base model is right. That is fixed before the runs, in
results/decision/hard_base.csv. A trained model has *solved* such a problem if at least LEAST of its AT_END responses
are right. The same count for the base model, with new responses, says how many it would have solved by luck.

    python research/hard_prompts.py  # writes results/decision/hard_base.csv, unless it is there
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from folders import RESULTS, ROOT
from hard_sums import TRAINED

from bapo_openrlhf.errors import RunError
from bapo_openrlhf.record.durable import write_atomically
from bapo_openrlhf.record.run_record import MODEL
from bapo_openrlhf.workbench.evaluation.store import read_rows

BASE, AT_END, LEAST = 64, 16, 2  # responses of the base model, those of a trained model, and how many have to be right
LEAST_SUCCESS, MOST_SUCCESS = 0.01, 0.05  # of the base model over all prompts, or the setting is not the planned one
BASE_COUNTS = RESULTS / "decision" / "hard_base.csv"
SOLVED = "solved.json"  # in the folder of a run
AGAIN = Path("runs") / "eval" / "hard_base_again"  # the same for the base model
CONFIG = ("configs/countdown/train.yaml", "configs/steps/train.yaml")
REWARD = "bapo_openrlhf/tasks/reasoning_gym.py"


def evaluate(
    model: Path, problems: Path, runs: int, out: Path, root: Path, *, limit: int, seed: int
) -> dict[str, list]:
    """Ask a model each of the first `limit` problems of a file `runs` times. An interrupted evaluation goes on.

    Returns:
        The scores of each problem, by the problem's text.

    Raises:
        RunError: The evaluation failed.
    """
    words = ["--config", *CONFIG, "--model", str(model), "--benchmarks", f"hard={problems}", "--reward", REWARD]
    words += ["--runs", str(runs), "--k", str(runs), "--limit", str(limit), "--seed", str(seed), "--out", str(out)]
    words += ["--name", "hard"]
    code = subprocess.run([sys.executable, "-m", "bapo_openrlhf.cli", "evaluate", *words], cwd=root).returncode
    if code:
        raise RunError(f"the evaluation of {model} ended with {code}; its output is above")
    return {row["input"]: row["scores"] for row in read_rows(out, "hard").values()}


def right(scores: Sequence[float]) -> int:
    """How many responses have full marks."""
    return sum(score >= 1 for score in scores)


def solved(scores: Mapping[str, Sequence[float]]) -> list[str]:
    """The problems of which at least LEAST responses are right."""
    return [problem for problem, of_problem in scores.items() if right(of_problem) >= LEAST]


def never_solved(counts: Mapping[str, int]) -> list[str]:
    """The problems that the base model never solved.

    Args:
        counts: How many of BASE responses are right, by problem.

    Raises:
        ValueError: The base model's success over all problems is not that of the setting.
    """
    success = sum(counts.values()) / (BASE * len(counts))
    if not LEAST_SUCCESS <= success <= MOST_SUCCESS:
        raise ValueError(f"the base model solves {success:.1%}; it must be {LEAST_SUCCESS:.0%} to {MOST_SUCCESS:.0%}")
    return [problem for problem, count in counts.items() if count == 0]


def read_base() -> dict[str, int]:
    """How many of BASE responses of the base model were right, by problem."""
    return {row.input: int(row.right) for row in pd.read_csv(BASE_COUNTS).itertuples()}


def write_base(root: Path) -> None:
    """Count the base model's right responses, unless that has been done."""
    count_base(root, BASE_COUNTS, "hard_sums/trained", "hard_base", responses=BASE, limit=TRAINED)


def count_base(root: Path, file: Path, problems: str, name: str, *, responses: int, limit: int) -> None:
    """Write how many of its responses to each of some problems the base model has right, unless the file is there.

    Args:
        root: The project's folder.
        file: The table: input, right.
        problems: Path of the problems in `runs/`, without its ending.
        name: Folder of the evaluation in `runs/eval/`.
        responses: Responses to each problem.
        limit: Number of problems.
    """
    if file.is_file():
        return
    data, out = root / "runs" / f"{problems}.jsonl", root / "runs" / "eval" / name
    scores = evaluate(root / "runs" / "steps_model", data, responses, out, root, limit=limit, seed=42)
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame({"input": list(scores), "right": [right(of_problem) for of_problem in scores.values()]})
    write_atomically(file, table.to_csv(index=False).encode())


def write_never(root: Path) -> None:
    """Write the problems that the base model never solves to a file, and count what it solves of them when asked again.

    Raises:
        ValueError: The counts are those of other problems.
    """
    hard, counts = root / "runs" / "hard_sums", read_base()
    with (hard / "trained.jsonl").open(encoding="utf-8") as file:
        rows = {json.loads(line)["input"]: line for line in file}
    if set(counts) != set(rows):
        raise ValueError(f"{BASE_COUNTS} has other problems than {hard / 'trained.jsonl'}")
    (hard / "never.jsonl").write_text("".join(rows[problem] for problem in never_solved(counts)), encoding="utf-8")
    again = root / AGAIN
    again.mkdir(parents=True, exist_ok=True)
    solved_by(again, root, model=root / "runs" / "steps_model")


def solved_by(folder: Path, root: Path, *, model: Path | None = None) -> None:
    """Write SOLVED into the folder of a run, unless it is there: which of the never solved problems its model solves.

    Args:
        model: The model; None is the trained model of the run.
    """
    if (folder / SOLVED).is_file():
        return
    never = root / "runs" / "hard_sums" / "never.jsonl"
    of = sum(1 for _ in never.open(encoding="utf-8"))
    scores = evaluate(model or folder / MODEL, never, AT_END, folder / "never", root, limit=of, seed=43)
    counts = {"solved": len(solved(scores)), "of": of, "right": {name: right(one) for name, one in scores.items()}}
    write_atomically(folder / SOLVED, (json.dumps(counts) + "\n").encode())


def main() -> int:
    """Count the base model's right responses, and show what they say."""
    write_base(ROOT)
    counts = read_base()
    success = sum(counts.values()) / (BASE * len(counts))
    print(f"{len(counts)} problems, {success:.2%} of the responses are right; {len(never_solved(counts))} never solved")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

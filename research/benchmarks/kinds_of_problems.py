"""How often a small model solves each kind of reasoning-gym's problems once it knows the form of an answer.

    bapo-openrlhf model smollm2 runs/smollm2
    python research/benchmarks/kinds_of_problems.py runs/smollm2 runs/kinds   # writes results/kinds_of_problems.csv

Each kind is taken at its easiest level. Kinds whose prompts are longer than PROMPT tokens are left out, and those with
few different problems. A short warm-up teaches the form: 4 answers of each kind, with the steps of a calculation where
the project can write them. Then the model answers 8 other problems of each kind, 4 times each. What is done stays, so
the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pandas as pd
from report import RESULTS
from transformers import AutoTokenizer

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import reasoning_gym as gym

PROMPT = 350  # tokens
PROBLEMS, RUNS, TAUGHT = 8, 4, 4  # of each kind
SLOW = ("sokoban",)  # making one problem takes seconds
COMMAND = (sys.executable, "-m", "bapo_openrlhf.cli")


def kinds(model: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the kinds that are asked, and why the others are not."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    gym.BLOCK, gym.MISSES = 64, 64
    asked, left_out = [], {}
    for task in sorted(gym.library().DATASETS.keys() - gym.REFUSED.keys()):
        if task in SLOW:
            left_out[task] = "slow to make"
            continue
        try:
            [kind] = gym.requested_kinds(f"{task}@0", None)
        except ConfigError:  # it has no levels, or the library refuses its own lowest one
            [kind] = gym.requested_kinds(task, None)
        texts = [problem.text for problem in gym.problems(kind, "test", PROBLEMS, 0)]
        if len(texts) < PROBLEMS:
            left_out[task] = "few different problems"
        elif max(len(tokenizer(text).input_ids) for text in texts) > PROMPT:
            left_out[task] = "long prompts"
        else:
            asked.append(kind.name)
    return asked, left_out


def main() -> int:
    """Prepare, warm up, evaluate, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="for data, model and answers")
    given = parser.parse_args()
    asked, left_out = kinds(given.model)
    print(f"{len(asked)} kinds are asked; left out: {left_out}")
    data, warm, answers = (given.folder / name for name in ("data", "model", "answers"))
    size = f"train={len(asked)},test={PROBLEMS},warmup={TAUGHT * len(asked)}"
    if not (data / "reasoning_gym" / "warmup.jsonl").exists():
        run("prepare", "reasoning_gym", "--tasks", ",".join(asked), "--prompt", "question", "--size", size,
            "--out", str(data / "reasoning_gym"))  # fmt: skip
    if not (warm / "config.json").exists():
        flags = {"model.model_name_or_path": given.model, "data.dataset": data / "reasoning_gym" / "warmup.jsonl",
                 "data.output_key": "solution", "data.max_len": PROMPT + 160, "train.batch_size": 16,
                 "train.micro_batch_size": 4, "train.max_epochs": 1, "train.seed": 1, "adam.lr": 1e-4,
                 "ds.attn_implementation": "eager", "ckpt.output_dir": warm}  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        subprocess.run([sys.executable, "examples/warmup.py", *words, "--data.apply_chat_template"], check=True)
    run("evaluate", "--model", str(warm), "--data", str(data), "--benchmarks", ",".join(asked), "--runs", str(RUNS),
        "--max-new-tokens", "96", "--temperature", "1", "--out", str(answers))  # fmt: skip
    table = pd.read_csv(answers / "results.csv").pivot(index="benchmark", columns="metric", values="value")
    table.index = table.index.str.removesuffix("@0")
    accuracies = table[[f"avg@{RUNS}", f"pass@{RUNS}"]].sort_values([f"avg@{RUNS}", f"pass@{RUNS}"], ascending=False)
    accuracies.round(1).to_csv(RESULTS / "kinds_of_problems.csv")
    print(accuracies.round(1).to_markdown())
    return 0


def run(*words: str) -> None:
    """Run a command of this project."""
    subprocess.run([*COMMAND, *words], check=True)


if __name__ == "__main__":
    raise SystemExit(main())

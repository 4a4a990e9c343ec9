"""Checks that a change left the numbers of a run as they were, for all four algorithms.

    python examples/quickstart --only-prepare   # base model and data, once
    git worktree add /tmp/before REVISION
    PYTHONPATH=/tmp/before python tools/same_numbers.py run runs/same/before
    python tools/same_numbers.py run runs/same/after
    python tools/same_numbers.py compare runs/same/before runs/same/after

`run` trains ten small deterministic steps of the quickstart's job for each algorithm and each number of ranks. Without
PYTHONSAFEPATH, Python would prefer the package of the folder that the command is called in to that of PYTHONPATH.
`compare` compares every metric of every step but times, to the last digit. Each optimizer step is one group, so that
every step is whole whatever the batch. Plain runs take one prompt a step and sample greedily, because OpenRLHF's
requests to vLLM have no seed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ALGORITHMS = ("grpo", "ppo", "bapo_grpo", "ba_ppo")
RANKS = (1, 2)
TIMES = ("timing/", "seconds", "reward/call")  # parts of the names of metrics that differ from run to run


def run(folder: Path) -> None:
    """Train with the package that PYTHONPATH names. A run that is complete already is left as it is."""
    for ranks in RANKS:
        for algorithm in ALGORITHMS:
            name = f"{algorithm}_{ranks}"
            if (folder / name / "summary.json").exists():
                continue
            shutil.rmtree(folder / name, ignore_errors=True)  # a run that was interrupted
            flags = {
                "algorithm": algorithm,
                "train.micro_batch_size": 8 // ranks,  # whole groups for every rank, so that nothing was cut before
                "rollout.micro_batch_size": 8 // ranks,
                "train.batch_size": 8,
                "rollout.batch_size": 12,
                "data.max_samples": 60,
                "run.dir": folder,
                "run.name": name,
                "run.logs": "full",
                "ckpt.path": folder / name / "checkpoints",
                "ckpt.output_dir": folder / name / "model",
            }
            if algorithm in ("grpo", "ppo"):
                flags |= {"rollout.batch_size": 1, "rollout.top_p": 1e-6, "data.max_samples": 5}
            flags |= {f"{model}.num_gpus_per_node": ranks for model in ("actor", "critic", "ref")}
            words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
            command = [sys.executable, "-m", "bapo_openrlhf.cli.train_ppo_ray", "--config", "configs/quickstart.yaml"]
            print(name, flush=True)
            with open(folder.parent / f"{folder.name}_{name}.log", "w") as log:
                subprocess.run(
                    [*command, "--train.full_determinism_enable", *words],
                    check=True, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONSAFEPATH": "1"},
                )  # fmt: skip


def compare(before: Path, after: Path) -> int:
    """Print each metric that differs, with the first such step and its two values. Return how many runs differ."""
    different = 0
    folders = sorted(path.parent for path in after.glob("*/metrics.jsonl"))
    if not folders:
        sys.exit(f"error: {after} has no runs; `run` writes them")
    for folder in folders:
        rows = [
            [json.loads(line) for line in (root / folder.name / "metrics.jsonl").read_text().splitlines()]
            for root in (before, after)
        ]
        keys = sorted({key for side in rows for row in side for key in row if not any(word in key for word in TIMES)})
        same = len(rows[0]) == len(rows[1])
        for key in keys:
            pairs = [(step, one.get(key), two.get(key)) for step, (one, two) in enumerate(zip(*rows, strict=False))]
            unequal = [(step, one, two) for step, one, two in pairs if one != two and not (one != one and two != two)]
            if unequal:
                same = False
                step, one, two = unequal[0]
                print(f"{folder.name}: {key} differs in {len(unequal)} steps, first in step {step}: {one} and {two}")
        different += not same
        print(
            f"{folder.name}: {len(rows[0])} and {len(rows[1])} steps, {len(keys)} metrics:", "same" if same else "NOT"
        )
    return different


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    if what == "run":
        Path(folders[0]).mkdir(parents=True, exist_ok=True)
        run(Path(folders[0]).resolve())
    else:
        sys.exit(compare(*map(Path, folders)))

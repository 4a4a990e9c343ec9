"""Checks that a change left the numbers of a run as they were, for all four algorithms.

    python examples/quickstart --only-prepare   # base model and data, once
    git worktree add /tmp/before REVISION
    PYTHONPATH=/tmp/before python tools/same_numbers.py run runs/same/before
    python tools/same_numbers.py run runs/same/after
    python tools/same_numbers.py compare runs/same/before runs/same/after [WITHIN]

`run` trains ten small deterministic steps of the quickstart's job for each algorithm and each number of ranks;
`run FOLDER NAME ...` makes only some of the runs. Without PYTHONSAFEPATH, Python would prefer the package of the folder
that the command is called in to that of PYTHONPATH.
`compare` compares every metric of every step but times, to the last digit, or within a share of the metric's largest
value in the run. Each optimizer step is one group, so every step is whole for a batch of any size. Plain runs take one
prompt in each step and sample greedily, because OpenRLHF's requests to vLLM have no seed. tests/stack/test_vision.py
checks runs with images.
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
# Further runs, of ba_ppo on two ranks: parts of OpenRLHF that another loop or another sync could lose.
PARTS = {
    "delay": {"adapt.rollout_delay": 3},
    "lora": {"ds.lora.rank": 8, "ds.lora.alpha": 64},
    "average": {"train.enable_ema": True, "train.ema_beta": 0.5},
    "tokens": {"adapt.micro_batch_tokens": 200},
}
TIMES = ("timing/", "seconds", "reward/call")  # parts of the names of metrics that differ from run to run


def runs() -> dict[str, dict[str, object]]:
    """The flags of each run that are not those of all, by its name."""
    whole = {f"{algorithm}_{ranks}": {"algorithm": algorithm, **of_ranks(ranks)}
             for ranks in RANKS for algorithm in ALGORITHMS}  # fmt: skip
    return whole | {f"ba_ppo_{name}": {"algorithm": "ba_ppo", **of_ranks(2), **flags} for name, flags in PARTS.items()}


def of_ranks(ranks: int) -> dict[str, object]:
    """Ranks of each model, and micro-batches of whole groups for each rank."""
    sizes = {f"{model}.num_gpus_per_node": ranks for model in ("actor", "critic", "ref")}
    return sizes | {"train.micro_batch_size": 8 // ranks, "rollout.micro_batch_size": 8 // ranks}


def run(folder: Path, names: list[str]) -> None:
    """Train with the package that PYTHONPATH names. A run that is complete already is left as it is."""
    for name, run_flags in runs().items():
        if (names and name not in names) or (folder / name / "summary.json").exists():
            continue
        shutil.rmtree(folder / name, ignore_errors=True)  # a run that was interrupted
        flags = run_flags | {
            "train.batch_size": 8,
            "rollout.batch_size": 12,
            "data.max_samples": 60,
            "run.dir": folder,
            "run.name": name,
            "run.logs": "full",
            "ckpt.path": folder / name / "checkpoints",
            "ckpt.output_dir": folder / name / "model",
        }
        if run_flags["algorithm"] in ("grpo", "ppo"):
            flags |= {"rollout.batch_size": 1, "rollout.top_p": 1e-6, "data.max_samples": 5}
        words = [
            word for key, value in flags.items() for word in (f"--{key}", *([] if value is True else [str(value)]))
        ]
        command = [sys.executable, "-m", "bapo_openrlhf.cli.train_ppo_ray", "--config", "configs/quickstart.yaml"]
        print(name, flush=True)
        with open(folder.parent / f"{folder.name}_{name}.log", "w") as log:
            subprocess.run(
                [*command, "--train.full_determinism_enable", *words],
                check=True, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONSAFEPATH": "1"},
            )  # fmt: skip


def compare(before: Path, after: Path, within: float) -> int:
    """Print each metric that differs, with the first such step and its two values. Return how many runs differ.

    Two values are equal if they differ by at most `within` of the metric's largest value in the run, or of 0.01 if this
    is larger: a mean that is 0 but for rounding has no digit to compare.
    """
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
            numbers = [abs(one) for _, one, _ in pairs if isinstance(one, (int, float)) and one == one]
            unequal = [(step, one, two) for step, one, two in pairs if differ(one, two, within * max([0.01, *numbers]))]
            if unequal:
                same = False
                step, one, two = unequal[0]
                print(f"{folder.name}: {key} differs in {len(unequal)} steps, first in step {step}: {one} and {two}")
        different += not same
        print(
            f"{folder.name}: {len(rows[0])} and {len(rows[1])} steps, {len(keys)} metrics:", "same" if same else "NOT"
        )
    return different


def differ(one: object, two: object, most: float) -> bool:
    """Whether two values of a metric differ. Two nan are equal."""
    if isinstance(one, (int, float)) and isinstance(two, (int, float)):
        return one != two and (one == one or two == two) and not abs(one - two) <= most
    return one != two


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "run":
        Path(folder).mkdir(parents=True, exist_ok=True)
        run(Path(folder).resolve(), rest)
    else:
        sys.exit(compare(Path(folder), Path(rest[0]), float(rest[1]) if rest[1:] else 0.0))

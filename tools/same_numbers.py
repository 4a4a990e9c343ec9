"""Checks that a change left the numbers of a run as they were, for all four algorithms.

    git worktree add /tmp/before REVISION                        # with an environment of its own: make .venv/.installed
    python examples/quickstart --size countdown --only-prepare   # base model and data, once in each of the two folders
    python tools/same_numbers.py run runs/same                   # likewise
    python tools/same_numbers.py compare /tmp/before/runs/same runs/same [WITHIN]

`run` trains ten small deterministic steps of the quickstart's job for each algorithm and each number of ranks, and for
each of PARTS. `run FOLDER NAME ...` makes only some of the runs.
`compare` compares every metric of every step but times, to the last digit, or within a share of the metric's largest
value in the run. To the last digit, it also compares the models that were saved at the end. Each optimizer step is one
group, so every step is whole for a batch of any size. Plain runs take one prompt in each step and sample greedily,
because OpenRLHF's requests to vLLM have no seed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

UNTRAINED = 3  # status of a run that came to its end, although all rewards of a prompt were equal
ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = ("grpo", "ppo", "bapo_grpo", "ba_ppo")
RANKS = (1, 2)
# Further runs on two ranks: parts of OpenRLHF that another loop or another sync could lose.
PARTS = {
    "ba_ppo_delay": {"adapt.rollout_delay": 3},
    "ba_ppo_lora": {"ds.lora.rank": 8, "ds.lora.alpha": 64},
    "ba_ppo_average": {"train.enable_ema": True, "train.ema_beta": 0.5},
    "ba_ppo_tokens": {"adapt.micro_batch_tokens": 200},
    "ba_ppo_ahead": {"train.async_enable": True},
    "bapo_grpo_partial": {"adapt.partial_rollout_tokens": 8},
    "bapo_grpo_images": {"data.max_images_per_prompt": 1, "data.apply_chat_template": True, "data.max_len": 192},
}
# Parts of the names of metrics that differ from run to run.
TIMES = ("timing/", "seconds", "reward/call", "groups/in_flight")


def runs() -> dict[str, dict[str, object]]:
    """The flags of each run that are not those of all, by its name."""
    whole = {f"{algorithm}_{ranks}": {"algorithm": algorithm, **of_ranks(ranks)}
             for ranks in RANKS for algorithm in ALGORITHMS}  # fmt: skip
    parts = {name: {"algorithm": name.rpartition("_")[0], **of_ranks(2), **flags} for name, flags in PARTS.items()}
    return whole | parts


def of_ranks(ranks: int) -> dict[str, object]:
    """Ranks of each model, and micro-batches of whole groups for each rank."""
    sizes = {f"{model}.num_gpus_per_node": ranks for model in ("actor", "critic", "ref")}
    return sizes | {"train.micro_batch_size": 8 // ranks, "rollout.micro_batch_size": 8 // ranks}


def with_images(folder: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Draw the problems of tests/stack/test_vision.py and make its model. Return the flags and the environment."""
    tests, site = ROOT / "tests" / "stack", folder / "site"
    site.mkdir(parents=True)
    if importlib.util.find_spec("torchvision") is None:
        shutil.copy(tests / "vision_torchvision.py", site / "torchvision.py")
    path = os.pathsep.join([str(site), str(tests), os.environ.get("PYTHONPATH", str(ROOT))])
    subprocess.run(
        [sys.executable, tests / "vision_model.py", folder], check=True, env=os.environ | {"PYTHONPATH": path}
    )
    flags = {"actor.model_name_or_path": folder / "model", "data.prompt_dataset": folder / "data.jsonl"}
    return flags | {"reward.remote_url": tests / "reward.py"}, {"PYTHONPATH": path}


def run(folder: Path, names: list[str]) -> None:
    """Train. A run that is complete already is left as it is."""
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
        environment: dict[str, str] = {}
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as inputs, open(folder.parent / f"{folder.name}_{name}.log", "w") as log:
            if "data.max_images_per_prompt" in run_flags:
                more, path = with_images(Path(inputs))
                flags, environment = flags | more, environment | path
            words = [
                word for key, value in flags.items() for word in (f"--{key}", *([] if value is True else [str(value)]))
            ]
            command = [sys.executable, "-m", "bapo_openrlhf.cli.train_ppo_ray", "--config"]
            done = subprocess.run(
                [*command, "configs/countdown/train.yaml", "--train.full_determinism_enable", *words],
                stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment,
            )  # fmt: skip
        if done.returncode not in (0, UNTRAINED):
            sys.exit(f"error: {name} ended with status {done.returncode}; its output is in {log.name}")


def saved(run: Path) -> dict[str, str]:
    """A digest of each file with weights that a run saved at its end. Averaged weights are seen only here."""
    files = (run / "model").rglob("*.safetensors")
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compare(before: Path, after: Path, within: float) -> int:
    """Print each metric and each saved model that differs. Return how many runs differ.

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
        if within == 0 and saved(before / folder.name) != saved(folder):
            same = False
            print(f"{folder.name}: the saved model differs")
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

"""Lets a small chat model learn on a GPU, in parts of their own, each of which may be stopped at any time.

    python research/benchmarks/gpu_learning.py before grpo bapo_grpo --seconds 800 --model runs/smollm2_warm
    python research/benchmarks/gpu_learning.py ba_ppo --seconds 800 --model runs/smollm2_warm
    python research/benchmarks/gpu_learning.py bits --seconds 800 --model runs/smollm2_warm
    python research/benchmarks/gpu_learning.py --dry-run   # all parts on the CPU; the tiny model learns nothing

The setting is configs/smollm2/train.yaml: sums, 8 prompts x 8 responses a step. `before` evaluates the model on the
held-out sums. `grpo`, `bapo_grpo` and `ba_ppo` train it, and evaluate it half-way and at the end: the parts of a call
share the seconds that are left, and a run gets as many steps as fit into its share. `bits` trains twice with one seed,
and compares all metrics but times to the bit.

The page and all rows are written after each row, into --out. A later call adds its parts to what is there.
research/smollm2.sh --only-prepare makes the model and the data. Other flags go to the training.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gpu
import gpu_run
from gpu_budget import Budget, Seconds
from gpu_setting import MODELS, ON_CPU, make_inputs
from report import RESULTS, again, origin, python_path

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.cpu.prefork import serving
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.start import shared_ray
from bapo_openrlhf.record.run_record import read_evaluations
from bapo_openrlhf.record.shapes import scores

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2" / "train.yaml"
ARMS = {"grpo": "GRPO", "bapo_grpo": "BAPO-GRPO", "ba_ppo": "BA-PPO"}
PARTS = ("before", *ARMS, "bits")
LEVELS = ("three", "four", "five", "tens", "six")
PROMPTS, RESPONSES = 8, 4  # prompts of a step; responses to each held-out problem
FIRST = Seconds(143.0, 2.0)  # until a step was measured: the longest start of a run so far, and a guess
ON_GPU = {
    "vllm.sync_backend": "nccl", "vllm.enforce_eager": "false", "vllm.gpu_memory_utilization": 0.3,
    "ds.attn_implementation": "sdpa", "train.colocate_all": "true", "vllm.enable_sleep": "true",
    "ds.enable_sleep": "true", "train.micro_batch_size": 32, "rollout.micro_batch_size": 64,
}  # fmt: skip
CLOCK = ("timing/", "seconds", "groups/in_flight")  # parts of the names of metrics that depend on the clock

Row = dict[str, Any]


def differences(first: Sequence[Row], second: Sequence[Row]) -> list[str]:
    """The metrics in which two runs differ, with the step in which each of them first does."""
    if len(first) != len(second):
        return [f"the number of steps: {len(first)} and {len(second)}"]
    found: dict[str, int] = {}
    for one, other in zip(first, second, strict=True):
        for name in sorted(one.keys() | other.keys()):
            timed = name == "end" or any(part in name for part in CLOCK)
            if not timed and repr(one.get(name)) != repr(other.get(name)):
                found.setdefault(name, one["step"])
    return [f"{name} from step {step}" for name, step in found.items()]


def rows_of_run(folder: Path) -> list[Row]:
    """The steps and the evaluations of a run in the order in which they were recorded."""
    evaluations = read_evaluations(folder) if folder.exists() else []
    rows = [(row["step"], 0, row) for row in gpu_run.rows_of_record(folder)]
    rows += [(row["step"], 1, {"evaluation": scores(row), "step": row["step"]}) for row in evaluations]
    return [row for _, _, row in sorted(rows, key=lambda one: one[:2])]


def rows_of_evaluation(folder: Path) -> list[Row]:
    """The accuracy of each level, from 0 to 1, that `bapo-openrlhf evaluate` has written; nothing before."""
    path = folder / "results.csv"
    if not path.exists():
        return []
    with path.open() as file:
        table = [row for row in csv.DictReader(file) if row["metric"].startswith("avg@")]
    return [{"step": 0, "evaluation": {row["benchmark"]: float(row["value"]) / 100 for row in table}}]


def mean(levels: Mapping[str, float]) -> float:
    """The mean accuracy over the levels, in per cent."""
    return 100 * sum(levels.values()) / len(levels)


class Learning:
    """The parts that were asked for, and what they have shown so far.

    Args:
        given, more: this script's flags, and those of the training.
        folder: for the files of the runs.
    """

    def __init__(self, given: argparse.Namespace, more: Sequence[str], folder: Path) -> None:
        self.given, self.more, self.folder = given, list(more), folder
        self.budget, self.environment = Budget(given.seconds), dict[str, str]()
        machine = gpu.prepare(given)[3]
        path = given.out / "gpu_learning.json"
        self.result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"parts": {}}
        self.origin = origin(again("research/benchmarks/gpu_learning.py"), *machine)
        self.flags = self._flags()

    def _flags(self) -> dict[str, Any]:
        """The flags of all runs but their places."""
        given, flags = self.given, dict(ON_GPU)
        data, held_out = given.data / "train.jsonl", [given.data / f"{level}.jsonl" for level in LEVELS]
        models = dict.fromkeys(("actor.model_name_or_path", "critic.model_name_or_path"), given.model)
        if given.dry_run:
            inputs = make_inputs(self.folder / "inputs", MODELS["tiny"], PROMPTS * given.steps)
            data, held_out = inputs["data.prompt_dataset"], [inputs["data.prompt_dataset"]]
            models = {**inputs, "data.apply_chat_template": "false", "data.max_len": 288, "rollout.max_new_tokens": 16}
            flags = dict(ON_CPU)
        return {
            **flags, **models, "data.prompt_dataset": data, "eval.dataset": ",".join(map(str, held_out)),
            "eval.n_samples_per_prompt": RESPONSES, "ckpt.best_metric_key": "none", "ckpt.disable_ds": "true",
            "train.num_episodes": 1_000, "run.answer_chars": 0,
        }  # fmt: skip

    # ── What is written ──

    def write(self) -> None:
        """Write the page and all rows. A file is whole, or is not there yet."""
        texts = {"gpu_learning.json": json.dumps(self.result, indent=1) + "\n", "gpu_learning.md": page(self.result)}
        for name, text in texts.items():
            new = self.given.out / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(self.given.out / name)

    def _begin(self, name: str, steps: int) -> Row:
        part = {"steps": steps, "rows": [], "missing": "the script itself was stopped", **self.origin}
        self.result["parts"][name] = part
        self.write()
        print(f"{name}: {steps} steps; {self.budget.left:.0f} s are left", flush=True)
        return part

    # ── The parts ──

    def run(self, names: Sequence[str]) -> None:
        """Run these parts, one after the other, as far as there is time."""
        for place, name in enumerate(names):
            seconds = self.budget.left / (len(names) - place)
            if name == "before":
                self.before()
            elif name == "bits":
                self.bits(seconds)
            else:
                self.train(name, name, self.steps(seconds), seconds)

    def steps(self, seconds: float) -> int:
        """An even number of steps that fits into so many seconds, and that no earlier run exceeds; 0 if no two fit."""
        if self.given.steps:
            return self.given.steps
        runs = [part for name, part in self.result["parts"].items() if name in ARMS]
        measured = [part["seconds"] for part in runs if part.get("seconds")]
        start, step = map(max, zip(*measured, strict=True)) if measured else FIRST
        most = min([self.given.most, *(part["steps"] for part in runs)])
        return 2 * max(0, int(min(most, (seconds - start) / step) // 2))

    def train(self, label: str, arm: str, steps: int, seconds: float, more: Sequence[str] = ()) -> None:
        """Train with an algorithm for so many steps and seconds, with evaluations half-way and at the end."""
        if not steps:
            print(f"{label}: not run, because {self.budget.left:.0f} s are left", flush=True)
            return
        part, place = self._begin(label, steps), self.folder / label
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        own = {"eval.steps": max(steps // 2, 1), "run.dir": place, "run.name": "run", "train.seed": self.given.seed}
        own |= {"ckpt.path": place / "checkpoints", "ckpt.output_dir": place / "model"}
        words = [
            word for name, value in (self.flags | own).items() for word in (f"--{name}", *[str(value)] * (value != ""))
        ]
        command = ["-m", "bapo_openrlhf.cli", "train", "--config", str(CONFIG), "--algorithm", arm]
        wanted = steps + len({max(steps // 2, 1), steps // max(steps // 2, 1) * max(steps // 2, 1)})
        words = [*command, *words, *self.more, *more]
        self._follow(part, place, words, lambda: rows_of_run(place / "run"), wanted, seconds)

    def before(self) -> None:
        """Evaluate the model as it is."""
        part, place = self._begin("before", 0), self.folder / "before"
        held_out = str(self.flags["eval.dataset"]).split(",")
        names = ",".join(f"{Path(path).stem}={path}" for path in held_out)
        words = ["--model", str(self.flags["actor.model_name_or_path"]), "--benchmarks", names, "--out", str(place)]
        words += ["--runs", str(RESPONSES), "--config", str(CONFIG), "--temperature", "0.6"]
        if self.given.dry_run:
            words += ["--no-chat-template", "--max-new-tokens", "16", "--reward", str(self.flags["reward.remote_url"])]
        elif "--reward.remote_url" in self.more:
            words += ["--reward", self.more[self.more.index("--reward.remote_url") + 1]]
        place.mkdir(parents=True, exist_ok=True)
        self._follow(part, place, ["-m", "bapo_openrlhf.cli", "evaluate", *words], lambda: rows_of_evaluation(place), 1,
                     self.budget.left)  # fmt: skip

    def bits(self, seconds: float) -> None:
        """Train twice with one seed, and compare."""
        steps, labels = min(self.given.steps or 10, 10), ("bits_1", "bits_2")
        for label in labels:
            self.train(label, "bapo_grpo", steps, seconds / 2, ["--train.full_determinism_enable"])
        one, other = (steps_of(self.result["parts"][label]) for label in labels)
        if one and other:
            self.result["bits"] = {"steps": len(one), "differences": differences(one, other)}
            self.write()

    def _follow(
        self, part: Row, place: Path, words: Sequence[str], read: Callable[[], list[Row]], wanted: int, seconds: float
    ) -> None:
        """Run a command for at most so many seconds, and keep each of its rows as it comes."""
        begun, over = time.time(), self.budget.clock() + seconds

        def seen(row: Row) -> None:
            part["rows"].append(row)
            done = steps_of(part)
            if len(done) > 1:
                step = (part["rows"][-1]["end"] - done[0]["end"]) / (len(done) - 1)  # evaluations are counted in
                part["seconds"] = [done[0]["end"] - begun, step]
            self.write()

        try:
            part["missing"] = gpu_run.follow(
                [serving.python(), *words], place / "output.log", read, seen, wanted=wanted,
                left=lambda: min(over - self.budget.clock(), self.budget.left),
                patience=300.0 if self.budget.limited else float("inf"),
                environment=self.environment,
            )  # fmt: skip
        finally:
            self.write()
        print(part["missing"] or f"done in {time.time() - begun:.0f} s", flush=True)


def steps_of(part: Mapping[str, Any]) -> list[Row]:
    """The rows of steps of a part."""
    return [row for row in part["rows"] if "evaluation" not in row]


def evaluations_of(part: Mapping[str, Any]) -> list[str]:
    """Each evaluation of a part, in words."""
    return [f"{mean(row['evaluation']):.1f} (step {row['step']})" for row in part["rows"] if "evaluation" in row]


def page(result: Mapping[str, Any]) -> str:
    """What was found so far."""
    lines = [
        "# Learning on a GPU",
        "",
        "SmolLM2-135M-Instruct on sums. Accuracy is the mean of the held-out levels in %.",
        "",
    ]
    lines += ["| part | steps | responses | seconds a step | accuracy | |", "| --- | ---: | ---: | ---: | --- | --- |"]
    for name, part in result["parts"].items():
        done = steps_of(part)
        seconds = f"{part['seconds'][1]:.2f}" if part.get("seconds") else "–"
        responses = f"{done[-1].get('rollouts/total', 0):,.0f}" if done else "–"
        missing = " ".join(part["missing"].split())[-200:].replace("|", "/")
        cells = [ARMS.get(name, name), f"{len(done)} of {part['steps']}", responses, seconds]
        lines.append(f"| {' | '.join([*cells, ', '.join(evaluations_of(part)) or '–', missing])} |")
    if "bits" in result:
        found = result["bits"]["differences"]
        told = f"differ in {len(found)} metrics: {', '.join(found[:8])}" if found else "are equal to the bit"
        lines += ["", f"Two runs of {result['bits']['steps']} steps with one seed {told}."]
    machines = dict.fromkeys(
        f"{part['machine']}; commit {part['commit']}: `{part['command']}`" for part in result["parts"].values()
    )
    return "\n".join([*lines, "", *(f"{machine}\n" for machine in machines)])


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and those of the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="in this order")
    parser.add_argument("--seconds", type=float, help="for everything; without it there is no limit")
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2_warm"), help="a chat model's folder")
    parser.add_argument(
        "--data", type=Path, default=Path("data/reasoning_gym"), help="folder of train.jsonl and levels"
    )
    parser.add_argument("--steps", type=int, default=0, help="of a run; without it, as many as fit")
    parser.add_argument("--most", type=int, default=200, help="most steps of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for the page and all rows")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, a tiny model and 2 steps")
    given, more = parser.parse_known_args(argv)
    given.gpus, given.peak_tflops = 1, None
    if given.dry_run:
        given.parts, given.steps, given.peak_tflops = given.parts or list(PARTS), 2, 1.0
    elif not given.parts:
        parser.error(f"name the parts: {', '.join(PARTS)}")
    elif cpu.active():
        parser.error("this machine has no GPU; --dry-run tries the script without one")
    elif not given.model.is_dir():
        parser.error(f"--model is {given.model}; there is no such folder (research/smollm2.sh --only-prepare)")
    given.model, given.data, given.out = given.model.absolute(), given.data.absolute(), given.out.absolute()
    return given, more


def main() -> None:
    """Run the parts, and write."""
    given, more = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))  # so that runs are ended
    gpu_run.adopt_orphans()
    given.out.mkdir(parents=True, exist_ok=True)
    folder = (given.out if given.dry_run else Path("runs")).absolute() / "gpu_learning"
    with ExitStack() as block:
        learning = Learning(given, more, folder)
        os.environ["PYTHONPATH"] = python_path()  # for processes that are forked
        block.enter_context(cpu.forked_processes())
        learning.environment = block.enter_context(shared_ray(4, 1))
        learning.run(given.parts)
    print(page(learning.result))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")

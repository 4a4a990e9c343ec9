"""`python examples/quickstart`: a base model, data, training on the real stack, a table and a picture.

Run it in the project's folder. All files go to runs/. The base model and the data are made only once. `--size` chooses
the task: sums; Countdown, whose answers are shorter; or steps, sums for a larger model, whose answers are longer.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import sums
from base_model import SUMS, ModelSettings, StepsModelSettings, build
from rich.console import Console
from sums_model import SumsModelSettings

from bapo_openrlhf.tasks import countdown, reasoning_gym
from bapo_openrlhf.workbench.prepare.build import Preparation, prepare

RUNS = Path("runs")


class Size(NamedTuple):
    """What a size is: its number of training prompts, the name of its run, and the files of its configuration."""

    prompts: int
    run: str
    files: list[str]


SIZES = {
    "sums": Size(768, "quickstart", ["configs/quickstart.yaml"]),
    "countdown": Size(1536, "countdown", ["configs/countdown/train.yaml"]),
    "steps": Size(1536, "steps", ["configs/countdown/train.yaml", "configs/steps/train.yaml"]),
}
COMMAND = (sys.executable, "-m", "bapo_openrlhf.cli")


def main() -> int:
    """Make the missing files, train, and show the result."""
    parser = argparse.ArgumentParser(prog="python examples/quickstart", allow_abbrev=False)
    parser.add_argument("--run.name", dest="name", help="name of the run; without it, the run of this size is replaced")
    parser.add_argument("--size", choices=SIZES, default="sums", help="sums: 28 tokens an answer; countdown: 7; "
        "steps: sums of reasoning-gym, 40 to 80 (default: sums)")  # fmt: skip
    parser.add_argument("--prompts", type=int, help="number of training prompts, at most 2500")
    parser.add_argument(
        "--only-prepare", action="store_true", help="make the base model and the data, but do not train"
    )
    given, flags = parser.parse_known_args()  # The other flags are those of `bapo-openrlhf train`.
    size = SIZES[given.size]
    prompts = size.prompts if given.prompts is None else given.prompts
    if not 1 <= prompts <= 2500:
        parser.error(f"--prompts is {prompts}; it must be 1 to 2500 because there are few different easy problems")
    console = Console()

    console.print("[bold]1/3[/] base model: a small Qwen3, taught imperfectly")
    folder, is_new = made(given.size, prompts)
    console.print(f"    {folder}" + ("" if is_new else " (made before)"))
    if given.only_prepare:
        return 0
    before = held_out(folder) if given.size == "sums" else None

    console.print("[bold]2/3[/] reinforcement learning on OpenRLHF: Ray, DeepSpeed, vLLM")
    # Training runs in a process of its own because it changes its environment and imports large libraries.
    words = ["--run.name", given.name] if given.name else ["--run.overwrite"]
    status = stoppable([*COMMAND, "train", "--config", *size.files, *words, *flags])
    if status != 0:
        return status

    from picture import answers_table, plot_run, summary_table

    from bapo_openrlhf.record.run_record import read_summary

    console.print("[bold]3/3[/] result")
    run = RUNS / (given.name or size.run)
    picture = plot_run(run, before=before)
    console.print(summary_table(read_summary(run)))
    if answers := answers_table(run):
        console.print(answers)
    console.print(f"accuracy on held-out problems, reward and batches: {picture}")
    return 0


def held_out(model: Path) -> float:
    """The share of held-out sums that the base model solves, by one sampled answer to each. It is asked only once."""
    name, problems = f"{model.name}_before", RUNS / "sums" / "held_out.jsonl"
    command = [*COMMAND, "evaluate", "--model", str(model), "--benchmarks", f"held_out={problems}", "--runs", "1"]
    command += ["--reward", "examples/quickstart/sums.py", "--max-new-tokens", "48", "--name", name]
    if subprocess.run([*command, "--out", str(RUNS / name)], stdout=subprocess.DEVNULL).returncode != 0:
        raise SystemExit("the base model could not be evaluated; the messages are above")
    results = json.loads((RUNS / name / "results.json").read_text(encoding="utf-8"))
    return float(results["benchmarks"]["held_out"]["metrics"]["avg@1"]["value"]) / 100


def stoppable(command: Sequence[str]) -> int:
    """Run a command to its end, and return its status. It gets the signals that end this process, and decides."""
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda sent, _frame: process.send_signal(sent))
    return process.wait()


def made(size: str, prompts: int) -> tuple[Path, bool]:
    """Write the data of a size. Returns its base model, and whether that was made now."""
    settings: ModelSettings | None = None
    if size == "sums":
        model, settings = "sums_model", SumsModelSettings()
        sums.write(RUNS / "sums", prompts)
    elif size == "countdown":
        model = "base_model"
        request = Preparation(out=RUNS / "data", generator="small", style="short", limits={"train": prompts})
        prepare(countdown.TASK, request)
    else:
        model, settings = "steps_model", StepsModelSettings()
        task = reasoning_gym.task_of_kinds(None, SUMS)
        [generator] = task.sizes or {}
        out = RUNS / task.name
        prepare(task, Preparation(out=out, generator=generator, style="question", limits={"train": prompts}))
    return build(RUNS / model, settings)


if __name__ == "__main__":
    sys.exit(main())

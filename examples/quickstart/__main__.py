"""`python examples/quickstart`: a base model, data, BA-PPO on the real stack, a table and a picture.

Run it in the project's folder. All files go to runs/. The base model and the data are made only once. With `--size
steps`, a larger model writes its steps before the answer.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from base_model import SUMS, StepsModelSettings, build
from rich.console import Console

from bapo_openrlhf.tasks import countdown, reasoning_gym
from bapo_openrlhf.tasks.task import Task
from bapo_openrlhf.workbench.prepare.build import Request, prepare

RUNS = Path("runs")
PROMPTS = countdown.TASK.sizes["small"]["train"]


def main() -> int:
    """Make the missing files, train, and show the result."""
    parser = argparse.ArgumentParser(prog="python examples/quickstart", allow_abbrev=False)
    parser.add_argument("--run.name", dest="name", help="name of the run; without it, the run of this size is replaced")
    parser.add_argument("--size", choices=("small", "steps"), default="small", help="small: Countdown, 7 tokens an "
        "answer; steps: sums with their steps, 40 to 80 tokens (default: small)")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="number of training prompts, at most 2500")
    parser.add_argument(
        "--only-prepare", action="store_true", help="make the base model and the data, but do not train"
    )
    given, flags = parser.parse_known_args()  # The other flags are those of `bapo-openrlhf train`.
    if not 1 <= given.prompts <= 2500:
        parser.error(
            f"--prompts is {given.prompts}; it must be 1 to 2500 because there are few different easy problems"
        )
    console = Console()

    steps = given.size == "steps"
    taught = "sums for a short time" if steps else "Countdown imperfectly"
    console.print(f"[bold]1/3[/] base model: a small Qwen3, taught {taught}")
    (folder, is_new), task, data = (_steps if steps else _small)(given.prompts)
    console.print(f"    {folder}" + ("" if is_new else " (made before)"))
    prepare(task, data)
    if given.only_prepare:
        return 0

    console.print("[bold]2/3[/] reinforcement learning on OpenRLHF: Ray, DeepSpeed, vLLM")
    # Training runs in a process of its own because it changes its environment and imports large libraries.
    files = ["configs/quickstart.yaml", *(["configs/steps/train.yaml"] if steps else [])]
    words = ["--run.name", given.name] if given.name else ["--run.overwrite"]
    command = [sys.executable, "-m", "bapo_openrlhf.cli", "train", "--config", *files, *words, *flags]
    status = stoppable(command)
    if status != 0:
        return status

    from picture import plot_run, summary_table

    from bapo_openrlhf.record.run_record import read_summary

    console.print("[bold]3/3[/] result")
    run = RUNS / (given.name or ("steps" if steps else "quickstart"))
    picture = plot_run(run)
    console.print(summary_table(read_summary(run)))
    console.print(f"reward curve and batch composition: {picture}")
    return 0


def stoppable(command: Sequence[str]) -> int:
    """Run a command to its end, and return its status. It gets the signals that end this process, and decides."""
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda sent, _frame: process.send_signal(sent))
    return process.wait()


def _small(prompts: int) -> tuple[tuple[Path, bool], Task, Request]:
    """The base model, whether it was made now, and the data to prepare: Countdown, only answers."""
    data = Request(out=RUNS / "data", generator="small", style="short", limits={"train": prompts})
    return build(RUNS / "base_model"), countdown.TASK, data


def _steps(prompts: int) -> tuple[tuple[Path, bool], Task, Request]:
    """The same for sums, with steps before the answer."""
    task = reasoning_gym.configured(None, SUMS)
    [generator] = task.sizes or {}
    data = Request(out=RUNS / task.name, generator=generator, style="question", limits={"train": prompts})
    return build(RUNS / "steps_model", StepsModelSettings()), task, data


if __name__ == "__main__":
    sys.exit(main())

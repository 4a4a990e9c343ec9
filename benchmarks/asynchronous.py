"""Measures what generation ahead of training saves, with engines that take longer, as on GPUs of their own.

    python benchmarks/asynchronous.py               # writes benchmarks/results/asynchronous.{json,md}
    python benchmarks/asynchronous.py --sleep 0.5

On two cores, engines and actor share the processor, so nothing could be saved. Therefore each call of the engine sleeps
for a while before it generates, without using the processor. The runs are the quickstart's with BAPO-GRPO. They take
turns in rounds; ratios are to the synchronous run of the same v and m, within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import steps
from floor_setting import make_inputs
from report import CORES, RESULTS, again, opening, origin, python_path, write

from bapo_openrlhf.cpu import stack as cpu

HERE = Path(__file__).parent
AHEAD = {"train.async_enable": ""}


def kind(queue: int, delay: int, again: int) -> steps.Kind:
    """A run with this queue (0: synchronous), v and m."""
    name = f"v = {delay}, m = {again}"
    flags = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": again}
    if not queue:
        return steps.Kind(f"{name}, synchronous", f"{name}, synchronous", "bapo_grpo", flags)
    flags |= AHEAD | {"train.async_queue_size": queue}
    return steps.Kind(f"{name}, q = {queue}", f"{name}, synchronous", "bapo_grpo", flags)


KINDS = tuple(kind(queue, delay, again) for delay, again in ((1, 2), (2, 4)) for queue in (0, 1, 2))


def measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of a step after the first ones, from its end to that of the next one, and what they are made of.

    Args:
        rows: Metrics of the steps.
    """
    rows = rows[steps.WARM_UP :]
    seconds = (rows[-1]["wall_seconds"] - rows[0]["wall_seconds"]) / (len(rows) - 1)
    names = {"generation": "timing/generation", "rollout": "rollouts/seconds", "waited": "rollouts/waited_seconds"}
    names |= {"age": "staleness/rollout_policy", "training": "timing/ppo_train"}
    means = {ours: statistics.mean(row.get(theirs) or 0.0 for row in rows) for ours, theirs in names.items()}
    return {"seconds": seconds} | means


def inside(words: Sequence[str]) -> int:
    """Train, in the process of a run, with the measured classes."""
    cpu.prepare_environment()
    cpu.install()

    import asynchronous_classes

    from bapo_openrlhf.cli.main import run as command
    from bapo_openrlhf.training.engine import engines
    from bapo_openrlhf.training.trainer import trainer

    engines.RolloutActor = asynchronous_classes.SleepingActor
    trainer.AdaptedPPOTrainerActor = asynchronous_classes.TimedTrainerActor
    return command(["train", *words])


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    text = (
        f"BAPO-GRPO in the quickstart's setting, with engines that sleep for {result['sleep']:g} s before each call. "
        f"Median of {result['rounds']} rounds with the smallest and the largest."
    )
    lines = [
        *opening("Generation ahead of training", text, result),
        "| run | step, s | ratio to the synchronous step | generation of a rollout, s | training, s "
        "| age of the fresh groups, steps |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in KINDS:
        entries, base = result["runs"][one.name], result["runs"][one.base]
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(entries, base, strict=True)]
        rollout = statistics.median(entry["rollout"] or entry["generation"] for entry in entries)
        training, age = (statistics.median(entry[name] for entry in entries) for name in ("training", "age"))
        spread = steps.with_spread([entry["seconds"] for entry in entries])
        lines.append(
            f"| {one.name} | {spread} | {steps.with_spread(ratios)} | {rollout:.2f} | {training:.2f} | {age:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--sleep", type=float, default=0.5, help="seconds that each call of the engine takes longer")
    given = parser.parse_args()
    result = origin(again("benchmarks/asynchronous.py"), CORES, "no GPU") | vars(given)
    result["runs"] = {one.name: [] for one in KINDS}
    os.environ["PYTHONPATH"] = python_path()
    os.environ["ASYNCHRONOUS_SLEEP"] = str(given.sleep)
    with cpu.forked_processes(), tempfile.TemporaryDirectory() as name:
        for number, one in steps.in_turn(KINDS, given.rounds):
            folder = Path(name) / f"{number}_{KINDS.index(one)}"
            folder.mkdir()
            flags, more = make_inputs("quickstart", folder, given.steps)
            program = (str(HERE / "asynchronous.py"), "--inside")
            rows = steps.run(one, folder, flags | {"train.seed": number}, more, program)
            result["runs"][one.name].append(measured(rows))
    write(RESULTS, "asynchronous", result, markdown(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(inside(sys.argv[2:]))
    main()

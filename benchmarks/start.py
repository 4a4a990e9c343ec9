"""Measures the time and processor time of a run until its first step on the CPU, with and without forked processes.

    python benchmarks/start.py            # writes benchmarks/results/start.{json,md}

It runs the quickstart until the first step is in the record, in both ways in turn, several times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from report import CORES, RESULTS, again, opening, origin, write

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.record.run_record import METRICS

KINDS = {"each process imports": "0", "forked": "1"}


def processor_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process, its descendants, and those of their children that have ended."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += sum(one.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def start(fork: str) -> dict[str, float]:
    """Seconds, processor seconds and memory (GiB; shared pages counted once) at the first step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--run.dir", name, "--run.name", "run", "--ckpt.path", f"{name}/checkpoints"]
        words = ["-m", "bapo_openrlhf.cli", "train", "--config", "configs/quickstart.yaml", *flags]
        begun = time.perf_counter()
        with (folder / "log").open("w") as log:
            run = subprocess.Popen(
                [sys.executable, *words, "--ckpt.output_dir", f"{name}/model"],
                env=os.environ | {cpu.FORK: fork},
                stdout=log,
                stderr=log,
            )
        process, metrics = psutil.Process(run.pid), folder / "run" / METRICS
        while not (metrics.exists() and metrics.stat().st_size):
            if run.poll() is not None:
                raise RuntimeError((folder / "log").read_text()[-4000:])
            time.sleep(0.05)
        numbers = {"seconds": time.perf_counter() - begun, "processor_seconds": processor_seconds(process)}
        everything = [process, *process.children(recursive=True)]
        numbers["gib"] = sum(one.memory_full_info().pss for one in everything if one.is_running()) / 2**30
        run.terminate()
        run.wait()
        psutil.wait_procs(everything, timeout=60)
        return numbers


def markdown(result: dict) -> str:
    """The page of results."""
    text = (
        f"`configs/quickstart.yaml` until its first step is recorded. Numbers are medians of {result['rounds']} "
        "rounds, with the smallest and the largest in brackets."
    )
    lines = [
        *opening("A start on the CPU", text, result),
        "| | seconds | processor seconds | GiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    numbers = {kind: {name: [run[name] for run in runs] for name in runs[0]} for kind, runs in result["runs"].items()}
    for kind, columns in numbers.items():
        cells = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in columns.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    plain, forked = (numbers[kind] for kind in KINDS)
    ratios = [
        f"{statistics.median(ours / theirs for ours, theirs in zip(forked[name], plain[name], strict=True)):.2f}"
        for name in forked
    ]
    return "\n".join([*lines, f"| ratio | {' | '.join(ratios)} |"]) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    subprocess.run([sys.executable, "examples/quickstart", "--only-prepare"], check=True)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind, fork in KINDS.items():
            runs[kind].append(start(fork))
            print(kind, runs[kind][-1], flush=True)
    header = origin(again("benchmarks/start.py"), CORES, "no GPU")
    result = {"rounds": given.rounds, **header, "runs": runs}
    write(RESULTS, "start", result, markdown(result))


if __name__ == "__main__":
    main()

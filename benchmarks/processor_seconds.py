"""Measures the processor seconds of a step, by process. Compare them before and after a change.

    python benchmarks/processor_seconds.py [grpo]     # prints; run it in a checkout of each commit, one after the other

It runs BAPO-GRPO, or another algorithm, on the quickstart's model and prompts, with one optimizer step a trainer step,
and measures steps 6 to 36.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from bapo_openrlhf.record.run_record import METRICS

FIRST, LAST = 6, 36


def by_name(process: psutil.Process) -> Counter[str]:
    """Processor seconds of a process and all its descendants, by the processes' names."""
    seconds: Counter[str] = Counter()
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
            seconds[one.name()] += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return seconds


def main() -> None:
    """Run, and print seconds and processor seconds a step."""
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "run" / METRICS
        places = ["--run.dir", name, "--ckpt.path", f"{name}/checkpoints", "--ckpt.output_dir", f"{name}/model"]
        algorithm = sys.argv[1] if len(sys.argv) > 1 else "bapo_grpo"
        sizes = ["--train.batch_size", "256", "--train.micro_batch_size", "128"]
        flags = ["--algorithm", algorithm, *sizes, "--run.name", "run", *places]
        words = ["-m", "bapo_openrlhf.cli", "train", "--config", "configs/quickstart.yaml", *flags]
        run = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        process, marks = psutil.Process(run.pid), []
        for step in (FIRST, LAST):
            while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < step:
                if run.poll() is not None:
                    raise RuntimeError(f"the run ended before step {step}")
                time.sleep(0.05)
            marks.append((time.perf_counter(), by_name(process)))
        run.terminate()
        run.wait()
    (start, before), (end, after) = marks
    steps = LAST - FIRST
    print(f"{(end - start) / steps:.3f} s and {sum((after - before).values()) / steps:.3f} processor seconds a step:")
    for kind, seconds in (after - before).most_common(8):
        print(f"  {seconds / steps:.3f} {kind}")


if __name__ == "__main__":
    main()

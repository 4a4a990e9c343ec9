"""Measures what each part of `--run.faster` saves in a step of BAPO-GRPO.

    python benchmarks/faster.py             # writes benchmarks/results/faster.{json,md}

The setting is that of benchmarks/steps.py: the quickstart's model and prompts. One kind of run has all parts, one has
none, and each other one lacks one part. The kinds take turns, and ratios are within a round, to the run with all parts.
On a GPU, `benchmarks/gpu.py --kinds bapo_grpo --run.faster PARTS` measures the same.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import CORES, RESULTS, again, opening, origin, write
from steps import SETTING, WARM_UP, Kind, in_turn, ratios, run, with_spread

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.flags.config import FASTER

TIMES = {  # of a step, and the part of `--run.faster` that changes it
    "step": "timing/step_total",
    "generation": "timing/generation",
    "experience": "timing/make_experience",
    "training": "timing/ppo_train",
    "weight sync": "timing/broadcast",
}
ALL = "all parts"


def without(parts: Sequence[str]) -> Kind:
    """BAPO-GRPO without these parts."""
    kept = [part for part in FASTER if part not in parts] or ["none"]
    name = ALL if not parts else "no part" if len(parts) == len(FASTER) else f"without {parts[0]}"
    return Kind(name, ALL, "bapo_grpo", {"run.faster": " ".join(kept)}, learns=False)


KINDS = [without([]), *(without([part]) for part in FASTER), without(FASTER)]


def measure(rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Mean seconds of a step and of its parts, for each kind, in each round."""
    runs: dict[str, list[dict[str, float]]] = {kind.name: [] for kind in KINDS}
    subprocess.run([sys.executable, "examples/quickstart", "--only-prepare"], check=True)
    with cpu.forked_processes():
        for seed, kind in in_turn(KINDS, rounds):
            flags = SETTING | {"data.max_samples": 32 * steps, "train.num_episodes": 1, "train.seed": seed}
            with tempfile.TemporaryDirectory() as name:
                rows = run(kind, Path(name), flags, ["--config", "configs/quickstart.yaml"])[WARM_UP:steps]
            runs[kind.name].append(
                {ours: statistics.mean(row.get(theirs, 0.0) for row in rows) for ours, theirs in TIMES.items()}
            )
    return runs


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    runs = result["runs"]
    text = (
        f"A run has {result['steps']} steps of BAPO-GRPO, and its numbers are means over the steps after the first "
        f"{WARM_UP}. The table has the median over {result['rounds']} rounds, with the smallest and the largest in "
        "brackets. A ratio is to the run of the same round with all parts. The quickstart's vocabulary has 64 "
        "tokens. For large ones [Kernels](kernels.md) compares `log_probs` with OpenRLHF, in seconds and memory, and "
        "[the third runs on a GPU](gpu_third.md) have steps without any part."
    )
    names = list(TIMES)
    lines = [
        *opening("What is done faster than in OpenRLHF", text, result),
        f"| `--run.faster` | ratio of a step | seconds: {' | '.join(names)} |",
        f"| --- | ---: | {' | '.join('---:' for _ in names)} |",
    ]
    for kind in KINDS:
        ratio = with_spread(ratios(runs, kind, "step")) if kind.name != ALL else "1"
        cells = [with_spread([one[name] for one in runs[kind.name]], 3) for name in names]
        lines.append(f"| {kind.name} | {ratio} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    given = parser.parse_args()
    result = {
        "steps": given.steps,
        "rounds": given.rounds,
        **origin(again("benchmarks/faster.py"), CORES, "no GPU"),
        "runs": measure(given.rounds, given.steps),
    }
    write(RESULTS, "faster", result, markdown(result))


if __name__ == "__main__":
    main()

"""Measures the two ways to multiply bfloat16 matrices on a CPU (bapo_openrlhf/cpu/products.py), with their ratio.

    python benchmarks/products.py           # writes benchmarks/results/products.{json,md}

A linear layer without bias, forward and backward, with one thread. The page keeps what was measured on other kinds of
CPUs. A CPU with AMX stands in for one with AVX2 if these variables are set: ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kernels import processor_seconds
from report import CORES, RESULTS, again, origin, write
from steps import with_spread
from tqdm import tqdm

WAYS = ("direct", "float32")
SHAPES = {  # rows, columns of the input, columns of the output
    "4,096 x 128 by 384": (4096, 128, 384),
    "64 x 128 by 384": (64, 128, 384),
    "8 x 128 by 384": (8, 128, 384),
    "1,024 x 576 by 1,536": (1024, 576, 1536),
    "16 x 576 by 1,536": (16, 576, 1536),
}


def measure(way: str) -> dict[str, dict[str, float]]:
    """Processor seconds of a forward pass, and of a forward and a backward pass, for each shape."""
    from bapo_openrlhf.cpu import products

    os.environ[products.SWITCH] = way

    import torch

    products.install(torch)
    torch.set_num_threads(1)
    result = {}
    for name, (rows, inner, columns) in SHAPES.items():
        layer = torch.nn.Linear(inner, columns, bias=False).bfloat16()
        x = torch.randn(rows, inner).bfloat16().requires_grad_()
        times = max(1, 2**26 // (rows * inner * columns))

        def forward(layer=layer, x=x, times=times) -> None:
            for _ in range(times):
                layer(x)

        def both(layer=layer, x=x, times=times) -> None:
            for _ in range(times):
                y = layer(x)
                y.backward(y)

        result[name] = {
            kind: processor_seconds(work, 4) / times for kind, work in (("forward", forward), ("both", both))
        }
    return result


def kind_of_cpu() -> str:
    """How torch and this project see this CPU."""
    import torch

    from bapo_openrlhf.cpu import products

    has = "with" if products.way() == "direct" else "without"
    limits = "".join(f", {name}={os.environ[name]}" for name in ("ONEDNN_MAX_CPU_ISA",) if name in os.environ)
    return f"{torch.backends.cpu.get_cpu_capability()}, {has} instructions for bfloat16{limits}"


def markdown(kinds: dict[str, Any]) -> str:
    """The page of results."""
    lines = [
        "# Products of bfloat16 matrices",
        "",
        "Milliseconds of one thread for a linear layer: medians, with the smallest and the largest in brackets. The "
        "ratio is that of the medians. `benchmarks/products.py` says what is measured.",
    ]
    for kind, result in kinds.items():
        lines += [
            "",
            f"## {kind}",
            "",
            f"{result['rounds']} rounds of two processes; {result['machine']}; commit {result['commit']}.",
            "",
            "| rows, and sizes of the layer | passes | direct | through float32 | direct / through float32 |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
        for shape in SHAPES:
            for passes, words in (("forward", "forward"), ("both", "forward and backward")):
                rows = [[1e3 * row[shape][passes] for row in result["found"][way]] for way in WAYS]
                direct, through = (sorted(row)[len(row) // 2] for row in rows)
                cells = [with_spread(row, 2) for row in rows]
                lines.append(f"| {shape} | {words} | {' | '.join(cells)} | {direct / through:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one)))
        return
    timings: dict[str, list[Any]] = {way: [] for way in WAYS}
    for way in tqdm([way for _ in range(given.rounds) for way in WAYS], unit="process"):
        words = [sys.executable, str(Path(__file__)), "--one", way]
        output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        timings[way].append(json.loads(output.splitlines()[-1]))
    page = RESULTS / "products.json"
    kinds = json.loads(page.read_text()) if page.exists() else {}
    kinds[kind_of_cpu()] = {
        "rounds": given.rounds,
        **origin(again("benchmarks/products.py"), CORES, "no GPU"),
        "found": timings,
    }
    write(RESULTS, "products", kinds, markdown(kinds))


if __name__ == "__main__":
    main()

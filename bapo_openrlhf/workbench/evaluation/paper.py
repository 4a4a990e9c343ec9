"""The paper's results as data: Table 1 of "Buffer Matters" (arXiv 2602.20722, Sec. 5.1), as printed.

The numbers are accuracies in percent, averaged over 32 runs. Two printed averages differ from the mean of their row:
DeepSeek R1 Distill Qwen 1.5B (48.90 instead of 49.08) and +GRPO (v = 5) (51.57 instead of 51.33).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

SOURCE = "arXiv 2602.20722, Table 1"
RUNS = 32


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        base: The model that was fine-tuned.
        method: The printed method, or the base model's name in its own row. A star means that the paper took the row
            from the method's own paper.
        values: Percent, in the order of the block's benchmarks.
        average: The printed average in percent.
        rollouts, kind: The last two columns of Table 1 (a). Table 1 (b) has none.
    """

    base: str
    method: str
    values: tuple[float, ...]
    average: float
    rollouts: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Block:
    """Rows that share their columns.

    Attributes:
        part: Name of this part of Table 1.
        title: What the benchmarks are about.
        benchmarks: The printed column head of each benchmark.
        average: The printed head of the average.
    """

    part: str
    title: str
    benchmarks: Mapping[str, str]
    average: str
    rows: tuple[Row, ...]


def _rows(base: str, *rows: tuple) -> tuple[Row, ...]:
    """Rows from (method, values, average, rollouts, kind). The first row is the base model's own, without a method."""
    first, *others = rows
    return (Row(base, base, *first), *(Row(base, *row) for row in others))


GRPO, DAPO, BAPO = "+GRPO (Guo et al., 2025)", "+DAPO (Yu et al., 2025)", "+BAPO (Ours)"
WITHOUT_X2, WITHOUT_X3 = "+BAPO w/o X2 (Ours)", "+BAPO w/o X3 (Ours)"

MATHEMATICS = Block(
    "1 (a)",
    "Mathematics",
    {"aime24": "AIME24", "amc": "AMC", "math500": "MATH500", "minerva": "Minerva.", "olympiad": "Olympiad."},
    "Avg.",
    _rows(
        "DeepSeek R1 Distill Qwen 1.5B",
        ((28.80, 62.90, 82.80, 26.50, 44.42), 48.90, "-", "-"),
        (GRPO, (30.73, 67.47, 85.40, 28.95, 45.33), 51.58, "677k", "on"),
        (DAPO, (35.73, 70.08, 86.05, 30.70, 48.48), 54.20, "1921k", "on"),
        ("+MoPPS* (Qu et al., 2025)", (33.33, 65.29, 84.94, 28.88, 45.93), 51.67, "737k", "on"),
        ("+GRPO (v = 5) (Mroueh et al., 2025)", (30.49, 65.09, 86.72, 28.16, 46.18), 51.57, "677k", "off"),
        ("+RePO (Li et al., 2025)", (30.42, 64.76, 83.75, 28.33, 45.44), 50.54, "677k", "off"),
        ("+Remix-GRPO* (Liang et al., 2025)", (33.33, 65.06, 84.60, 26.10, 43.55), 50.53, "-", "off"),
        (BAPO, (38.54, 72.74, 89.18, 29.55, 50.06), 56.01, "733k", "off"),
    ),
)

PLANNING = Block(
    "1 (b)",
    "Planning",
    {"cd34": "CD-34", "cd4": "CD-4"},
    "Avg",
    (
        *_rows(
            "Qwen2.5 Math 1.5B",
            ((1.12, 0.37), 0.75),
            (GRPO, (62.94, 35.88), 49.41),
            (DAPO, (70.56, 45.87), 58.22),
            (WITHOUT_X2, (60.31, 35.31), 47.81),
            (WITHOUT_X3, (64.43, 38.75), 51.59),
            (BAPO, (73.00, 47.50), 60.25),
        ),
        *_rows(
            "Qwen2.5 Math 7B",
            ((2.68, 0.94), 1.81),
            (GRPO, (70.75, 50.25), 60.50),
            (DAPO, (78.75, 57.43), 68.09),
            (BAPO, (79.13, 57.13), 68.13),
        ),
    ),
)

GEOMETRY = Block(
    "1 (b)",
    "Visual geometry",
    {"geo3k_val": "Geo-3K(val)", "geo3k_test": "Geo-3K(test)"},
    "Avg",
    (
        *_rows(
            "Qwen2.5 VL 3B",
            ((14.77, 19.18), 16.98),
            (GRPO, (36.44, 43.12), 39.78),
            (DAPO, (40.11, 45.18), 42.65),
            (WITHOUT_X2, (30.57, 36.92), 33.75),
            (WITHOUT_X3, (32.22, 39.79), 36.01),
            (BAPO, (40.11, 46.33), 43.22),
        ),
        *_rows(
            "Qwen2.5 VL 7B",
            ((30.40, 36.10), 33.25),
            (GRPO, (40.79, 47.15), 43.97),
            (DAPO, (40.87, 47.02), 43.95),
            (BAPO, (41.89, 48.77), 45.33),
        ),
    ),
)

BLOCKS = (MATHEMATICS, PLANNING, GEOMETRY)
BENCHMARKS = {name: head for block in BLOCKS for name, head in block.benchmarks.items()}


def blocks_with(names: Container[str]) -> list[Block]:
    """The blocks of which at least one benchmark is in `names`."""
    return [block for block in BLOCKS if any(name in names for name in block.benchmarks)]

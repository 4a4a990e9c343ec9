"""The paper's results as data: Table 1 of "Buffer Matters" (arXiv 2602.20722, Sec. 5.1). The rows are in paper.yaml."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SOURCE = "arXiv 2602.20722, Table 1"
RUNS = 32


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    base: str  # the model that was fine-tuned
    method: str  # as printed; a star means that the paper took the row from the method's own paper
    values: tuple[float, ...]  # percent, in the order of the block's benchmarks
    average: float
    rollouts: str | None = None  # this and `kind` are only in Table 1 (a)
    kind: str | None = None


@dataclass(frozen=True)
class Block:
    """Rows that share their columns. `benchmarks` and `average` are the printed heads of these."""

    part: str
    title: str
    benchmarks: Mapping[str, str]
    average: str
    rows: tuple[Row, ...]


def _block(rows: dict[str, dict[str, list[Any]]], **fields: Any) -> Block:
    """A block from its rows: for each base model and method a number for each benchmark, the average, and the rest."""
    count = len(fields["benchmarks"])
    block_rows = [
        Row(base, method, tuple(cells[:count]), *cells[count:])
        for base, rows_of in rows.items()
        for method, cells in rows_of.items()
    ]
    return Block(**fields, rows=tuple(block_rows))


BLOCKS = tuple(_block(**block) for block in yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text("utf-8")))
BENCHMARKS = {name: head for block in BLOCKS for name, head in block.benchmarks.items()}


def blocks_with(names: Container[str]) -> list[Block]:
    """The blocks that have at least one benchmark in `names`."""
    return [block for block in BLOCKS if any(name in names for name in block.benchmarks)]

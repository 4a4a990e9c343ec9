"""Print tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from bapo_openrlhf.workbench.pages.table import Table

WIDTH = 140  # Columns if the output is not a terminal. The paper's widest table needs them.


def show(tables: Sequence[Table], last: str) -> None:
    """Print tables with their notes, and a last line."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables:
        console.print(table.rich())
        for note in table.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        console.print()
    console.print(last, highlight=False, markup=False, soft_wrap=True)

"""Print tables in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from bapo_openrlhf.workbench.pages.table import Table

WIDTH = 140  # Columns if the output is not a terminal. The paper's widest table needs them.


def wide_console(**settings: Any) -> Console:
    """A console that has `WIDTH` columns if the output is not a terminal."""
    console = Console(**settings)
    return console if console.is_terminal else Console(width=WIDTH, **settings)


def show(tables: Sequence["Table"], last: str) -> None:
    """Print tables with their notes, and a last line."""
    console = wide_console()
    for table in tables:
        console.print(table.rich())
        for note in table.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        console.print()
    console.print(last, highlight=False, markup=False, soft_wrap=True)

"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable


WIDTH = 140  # of what is printed to a file


@dataclass(frozen=True)
class Table:
    """Cells, ready to be shown.

    Attributes:
        title: above it.
        columns: heads.
        rows: cells; as many as columns.
        strong: numbers of the rows that stand out.
        words: how many columns, from the left, hold words; the others hold numbers.
        notes: below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    strong: frozenset[int] = field(default_factory=frozenset)
    words: int = 1
    notes: Sequence[str] = ()


def percent(value: float) -> str:
    """A value in percent, as the paper prints it."""
    return f"{value:.2f}"


def with_interval(estimate: dict[str, float] | None, signed: bool = False) -> str:
    """Value and interval in percent; "-" where there is none."""
    if estimate is None:
        return "-"
    sign = "+" if signed else ""
    return f"{estimate['value']:{sign}.2f} [{estimate['low']:{sign}.2f}, {estimate['high']:{sign}.2f}]"


def markdown(table: Table) -> str:
    """The table as Markdown, its title as a heading, its notes as a list."""
    below = ["---" if number < table.words else "---:" for number in range(len(table.columns))]
    lines = [f"## {table.title}", "", _line(table.columns), _line(below)]
    for number, row in enumerate(table.rows):
        lines.append(_line([f"**{cell}**" for cell in row] if number in table.strong else row))
    lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def show(tables: Sequence[Table], last: str) -> None:
    """Print tables and a last line; with room for the paper's widest table where that goes to no terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables:
        console.print(rich_table(table))
        for note in table.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        console.print()
    console.print(last, highlight=False, markup=False, soft_wrap=True)


def rich_table(table: Table) -> RichTable:
    """The table without its notes, for rich's console."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    shown = RichTable(title=escape(table.title), title_justify="left")
    for number, head in enumerate(table.columns):
        shown.add_column(escape(head), justify="left" if number < table.words else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        # The interval goes below its value: the table stays narrow.
        cells = [escape(cell.replace(" [", "\n[")) for cell in row]
        section = number + 1 in table.strong and number not in table.strong
        shown.add_row(*cells, style="bold" if number in table.strong else None, end_section=section)
    return shown

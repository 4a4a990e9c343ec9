"""A table: cells in a DataFrame, shown as HTML by a page, as Markdown, or in a terminal."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from bapo_openrlhf.workbench.pages.text import WIDTH, number


@dataclass(frozen=True)
class Table:
    """A table and what is written around it: the title above it, and the notes below."""

    frame: pd.DataFrame  # cells of text, numbers, or None for nothing
    title: str = ""
    words: int = 1  # columns that hold words, from the left; the others hold numbers
    strong: frozenset[int] = frozenset()  # places of rows that stand out
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", **more: Any) -> Self:
        columns = pd.Index(list(head), dtype=object)  # pandas' own type for text takes no lone surrogate
        return cls(pd.DataFrame([list(row) for row in rows], columns=columns, dtype=object), title, **more)

    @property
    def head(self) -> list[str]:
        return list(self.frame.columns)

    @property
    def rows(self) -> list[list[Any]]:
        return [list(row) for row in self.frame.itertuples(index=False, name=None)]

    def markdown(self) -> str:
        """The table as Markdown: the title as a heading, and the notes as a list."""
        cells = self.frame.map(number)
        for place in self.strong:
            cells.iloc[place] = "**" + cells.iloc[place] + "**"
        cells = cells.replace({r"\|": r"\\|", r"\s+": " "}, regex=True)
        cells.columns = [" ".join(name.replace("|", "\\|").split()) for name in self.head]
        align = ["left" if place < self.words else "right" for place in range(len(self.head))]
        lines = cells.to_markdown(index=False, disable_numparse=True, colalign=align if len(cells) else None)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return (f"## {self.title}\n\n" if self.title else "") + lines + "\n" + (f"\n{notes}" if notes else "")

    def rich(self) -> RichTable:
        """The table without its notes, for a terminal."""
        table = RichTable(title=escape(self.title) if self.title else None, title_justify="left")
        for place, name in enumerate(self.head):
            table.add_column(escape(name), justify="left" if place < self.words else "right", overflow="fold")
        for place, row in enumerate(self.rows):
            # The interval goes below its value, so that the table stays narrow.
            cells = [escape(number(cell).replace(" [", "\n[")) for cell in row]
            section = place + 1 in self.strong and place not in self.strong
            table.add_row(*cells, style="bold" if place in self.strong else None, end_section=section)
        return table


def show(tables: Sequence[Table], last: str) -> None:
    """Print tables with their notes in a terminal, and a last line."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables:
        console.print(table.rich())
        for note in table.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        console.print()
    console.print(last, highlight=False, markup=False, soft_wrap=True)

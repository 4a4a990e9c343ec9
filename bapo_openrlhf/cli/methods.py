"""`bapo-openrlhf methods`: list the methods and their variants."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.methods.registry import METHODS, overview
from bapo_openrlhf.workbench.pages.text import WIDTH


def main(argv: Sequence[str], prog: str = "bapo-openrlhf methods") -> int:
    """Print the table: name, sentence, use and source."""
    Parser(prog, __doc__).parse_args(argv)
    table = Table("name", "what it does", "when to use it", Column("source", no_wrap=True))
    for name, cells in overview().items():
        table.add_row(name, *cells, end_section=name == METHODS[-1])
    console = Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False)
    console.print(table)
    console.print("Above the line: values of --adapt.method. All but bapo are files as well: configs/methods/NAME.yaml")
    return 0

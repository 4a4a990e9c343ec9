"""`bapo-openrlhf methods`: list the methods and their variants."""

from collections.abc import Sequence

from rich.table import Column, Table

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.cli.show import wide_console
from bapo_openrlhf.methods.registry import METHODS, overview


def main(argv: Sequence[str], prog: str = "bapo-openrlhf methods") -> int:
    """Print the table: name, sentence, use and source."""
    Parser(prog, "List the methods and their variants.").parse_args(argv)
    table = Table("name", "what it does", "when to use it", Column("source", no_wrap=True))
    for name, cells in overview().items():
        table.add_row(name, *cells, end_section=name == METHODS[-1])
    console = wide_console(markup=False, highlight=False)
    console.print(table)
    console.print("Above the line: values of --adapt.method. All but bapo are files as well: configs/methods/NAME.yaml")
    return 0

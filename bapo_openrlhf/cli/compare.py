"""`bapo-openrlhf compare`: compare evaluation B with evaluation A, problem by problem.

The table has differences with paired bootstrap intervals, and how many problems were gained and lost.
"""

from collections.abc import Sequence
from pathlib import Path

from bapo_openrlhf.cli.parser import Parser


def main(argv: Sequence[str], prog: str = "bapo-openrlhf compare") -> int:
    """Parse the flags, compare, and print the table."""
    parser = Parser(prog, __doc__)
    parser.add_argument("a", type=Path, metavar="RUN_A", help="folder of evaluation A")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="folder of evaluation B")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/compare/A_B)")
    args = parser.parse_args(argv)

    from bapo_openrlhf.workbench.evaluation.compare import compare, table
    from bapo_openrlhf.workbench.pages.table import show

    out = args.out or Path("runs") / "compare" / f"{args.a.resolve().name}_{args.b.resolve().name}"
    result = compare(args.a, args.b, out)
    show([table(result)], f"compare.md and .json are in {out}")
    return 0

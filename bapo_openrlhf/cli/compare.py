"""`bapo-openrlhf compare`: compare two evaluations of the same problems."""

from collections.abc import Sequence
from pathlib import Path

from bapo_openrlhf.cli.parser import Parser


def main(argv: Sequence[str], prog: str = "bapo-openrlhf compare") -> int:
    """Parse the flags, compare, and print the table."""
    parser = Parser(
        prog,
        "Compare evaluation B with evaluation A, problem by problem: differences with paired bootstrap "
        "intervals, problems gained and lost.",
    )
    parser.add_argument("a", type=Path, metavar="RUN_A", help="folder of evaluation A")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="folder of evaluation B")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/compare/A_B)")
    args = parser.parse_args(argv)

    from bapo_openrlhf.cli.show import show
    from bapo_openrlhf.workbench.evaluation.compare import compare, table

    out = args.out or Path("runs") / "compare" / f"{args.a.resolve().name}_{args.b.resolve().name}"
    result = compare(args.a, args.b, out)
    show([table(result)], f"compare.md and .json are in {out}")
    return 0

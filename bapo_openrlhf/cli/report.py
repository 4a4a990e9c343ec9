"""`bapo-openrlhf report`: write one HTML page that shows and compares runs.

It has their reward, batches, cost, theory and hard prompts. It needs no network and no other file.
"""

from collections.abc import Sequence
from pathlib import Path

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.pages.text import printable


def main(argv: Sequence[str], prog: str = "bapo-openrlhf report") -> int:
    """Parse the arguments, read the runs and write the page."""
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder; others are compared with the first")
    add("--output", type=Path, metavar="PAGE.html", help="default: report.html in the first run's folder")
    args = parser.parse_args(argv)
    output = args.output or args.runs[0] / "report.html"
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder; give the file to write, PAGE.html")

    from bapo_openrlhf.workbench.report.opening import opening
    from bapo_openrlhf.workbench.report.runs import read_runs
    from bapo_openrlhf.workbench.report.sections import make_page

    runs = read_runs(args.runs)
    _check_writable(output)
    print(printable(opening(runs)))
    page = make_page(runs)
    output.write_text(page, encoding="utf-8")
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


def _check_writable(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        existed = output.exists()
        output.open("ab").close()
        if not existed:
            output.unlink()
    except OSError as error:
        raise ConfigError(
            f"the page {str(output)!r} cannot be written: {error.strerror}; give --output PAGE.html in another folder"
        ) from None

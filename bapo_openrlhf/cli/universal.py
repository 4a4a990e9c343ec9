"""`bapo-openrlhf universal`: convert the newest whole checkpoint of a run to DeepSpeed's universal format.

Any number of ranks can load that.
"""

from collections.abc import Sequence
from pathlib import Path

from bapo_openrlhf.cli.parser import Parser


def main(argv: Sequence[str], prog: str = "bapo-openrlhf universal") -> int:
    """Convert, and say how the run goes on."""
    parser = Parser(prog, __doc__)
    parser.add_argument("path", metavar="CKPT", type=Path, help="ckpt.path of the run: DIR/NAME/checkpoints by default")
    path = parser.parse_args(argv).path

    from bapo_openrlhf.launch.universal import convert

    tag = convert(path)
    print(f"{path}: any number of ranks can resume {tag}, with the run's command and --ckpt.load_enable "
          "--ds.use_universal_ckpt")  # fmt: skip
    return 0

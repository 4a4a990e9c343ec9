"""`bapo-openrlhf plan`: predict what a run needs with other models and GPUs, and whether it fits.

It needs memory, responses and buffers, each for GRPO, PPO, DAPO, BAPO-GRPO and BA-PPO. Nothing is loaded or measured.
All flags of `train` are allowed too, above all --config.
"""

from collections.abc import Sequence

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.ranges import check_ranges
from bapo_openrlhf.workbench.planning.constants import DATA_SHEETS, constants_of
from bapo_openrlhf.workbench.planning.shapes import SHAPES, ModelShape, shape_of_actor
from bapo_openrlhf.workbench.planning.workload import Workload

GPUS = [8, 16, 32, 64, 128, 256, 512, 1024]


def build_parser(prog: str) -> Parser:
    """The command's own flags. All other flags are those of `train`."""
    parser = Parser(prog, __doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=None, help="numbers of GPUs "
                        "(default: the configuration's own, and 8 to 1024)")  # fmt: skip
    parser.add_argument("--models", nargs="+", default=None, metavar="SIZE", help=f"any of {' '.join(SHAPES)} "
                        "(default: the actor if it is one of them or a local folder, otherwise all)")  # fmt: skip
    parser.add_argument("--gpu", default="H100", help=f"kind of GPU: {', '.join(DATA_SHEETS)} (default: H100)")
    parser.add_argument("--steps", type=int, default=100, help="trainer steps of the whole run (default: 100)")
    return parser


def main(argv: Sequence[str], prog: str = "bapo-openrlhf plan") -> int:
    """Parse the flags, make the plan, and print it."""
    options, rest = build_parser(prog).parse_known_args(argv)
    check_ranges(vars(options), {"gpus": "at least 1", "steps": "at least 1"})
    constants = constants_of(options.gpu)
    args = arguments.parse(rest, prog)

    from bapo_openrlhf.workbench.planning.output import Plan, page  # it imports pandas, and OpenRLHF is asked for first

    shapes = _shapes(options.models, args.actor.model_name_or_path)
    args.adapt.thresholds()  # raises ConfigError also for an algorithm that does not use them
    workload = Workload(args)
    gpus = sorted({*(options.gpus or [workload.gpus, *GPUS])})
    plan = Plan(shapes, gpus, workload, constants, options.steps)
    print(page(plan))
    return 0


def _shapes(sizes: Sequence[str] | None, actor: str | None) -> list[ModelShape]:
    """The shapes of the requested sizes. Without any: the actor's own shape if it is known, otherwise all."""
    for size in sizes or []:
        if size not in SHAPES:
            raise ConfigError(f"models has {size!r}; each must be one of {', '.join(SHAPES)}")
    if sizes is None and (actor_shape := shape_of_actor(actor)):
        return [actor_shape]
    return [SHAPES[size] for size in dict.fromkeys(sizes or SHAPES)]

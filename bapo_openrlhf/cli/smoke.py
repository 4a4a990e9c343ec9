"""`bapo-openrlhf smoke`: show in minutes that a long run will work on this machine.

It makes two steps of the configuration with the model's own architecture and vocabulary but two layers and random
weights, then a save, a kill and a resume. All flags of `train` are allowed, above all --config. No weights are loaded:
config.json and the tokenizer are enough.
"""

import uuid
from collections.abc import Sequence

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.training.driver.signals import caught


def main(argv: Sequence[str], prog: str = "bapo-openrlhf smoke") -> int:
    """Parse, run, and return 0 if the smoke run passes, otherwise 1. A signal ends its processes, too."""
    _, rest = Parser(prog, __doc__).parse_known_args(argv)
    args = arguments.parse(rest, prog)
    defaults = {action.dest: action.default for action in arguments.build_parser(prog)._actions}

    from rich.console import Console

    from bapo_openrlhf.record.owner import owned
    from bapo_openrlhf.workbench.smoke.run import Smoke, Stages

    console = Console(highlight=False, markup=False, soft_wrap=True)
    field, instead = f"run.name is {args.run.name}", "give another --run.name"
    with caught("within the smoke run"), console.status("checks") as status:
        smoke = Smoke(args, defaults, Stages(uuid.uuid4().hex, console.print, status.update))
        with owned(smoke.folder, field=field, what="smoke run", instead=instead):
            console.print(f"smoke run of {args.run.name}:")
            return 0 if smoke.passes() else 1

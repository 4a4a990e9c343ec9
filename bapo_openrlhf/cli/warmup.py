"""`bapo-openrlhf warmup`: supervised training on worked solutions with OpenRLHF's own trainer, before `train`."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bapo_openrlhf import host
from bapo_openrlhf.cli.arguments import as_words
from bapo_openrlhf.cli.parser import parse_words
from bapo_openrlhf.errors import refuse
from bapo_openrlhf.flags import ranges
from bapo_openrlhf.flags.files import settings_of
from bapo_openrlhf.flags.paths import expand_home
from bapo_openrlhf.flags.rule import check_rules
from bapo_openrlhf.flags.rules import PACKED, shares

# The flags of OpenRLHF's two scripts mean the same. One script has them for the actor and the critic.
ACTOR = "actor."
VALUES = ranges.VALUES | {name.removeprefix(ACTOR): rule for name, rule in ranges.VALUES.items() if ACTOR in name}


def main(argv: Sequence[str], prog: str = "bapo-openrlhf warmup") -> int:
    """Parse, check, train."""
    parser = host.build_parser(host.SFT)
    parser.prog, parser.usage, parser.description = prog, "%(prog)s --config YAML [flags]", __doc__
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--config", metavar="YAML", nargs="+", action="extend", help="files of flags; a later file "
                        "overrules an earlier one, the command line overrules all files")  # fmt: skip
    parser.set_defaults(**{"data.output_key": "solution"})  # the column that `bapo-openrlhf prepare` writes
    words = [
        word
        for path in parse_words(parser, argv).config or []
        for word in as_words(parser, list(settings_of(path)), path)
    ]
    flat = parse_words(parser, [*words, *argv])
    expand_home(flat)
    check_rules([PACKED, shares("data.dataset_probs", "data.dataset")], vars(flat))
    ranges.check_ranges(vars(flat), {flag: rule for flag, rule in VALUES.items() if flag in vars(flat)})
    args = host.validate(flat, host.SFT)

    from bapo_openrlhf.launch.warmup import check, launch

    with TemporaryDirectory() as folder:
        launch(args, check(args, Path(folder)), argv)
    return 0

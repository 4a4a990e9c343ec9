"""Read YAML files and a command line, and return OpenRLHF's arguments with this project's.

From low to high, the precedence is: what the algorithm stands for, the YAML files in their order, the command line. If
the command line or a later file chooses another `--algorithm`, this also overrules the estimator and the method that a
file has for its own algorithm.
"""

import argparse
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import host
from bapo_openrlhf.cli.parser import as_switch, did_you_mean, is_switch, parse_words
from bapo_openrlhf.errors import ConfigError, refuse
from bapo_openrlhf.flags import config
from bapo_openrlhf.flags.files import ESTIMATOR, SIZES, Layers, settings_of
from bapo_openrlhf.flags.paths import LISTS, expand_home
from bapo_openrlhf.flags.ranges import check_template
from bapo_openrlhf.flags.rules import check_values
from bapo_openrlhf.methods.registry import file_hint
from bapo_openrlhf.record.run_record import CHECKPOINTS, MODEL

OUTPUTS = {"ckpt.output_dir": MODEL, "ckpt.path": CHECKPOINTS}  # in the run's folder unless they are given
LOGGED_AS = "logger.wandb.run_name"  # the run's name unless it is given; also the folder within logger.tensorboard_dir
MOST_NAMED = 12  # flags of a section in an error
REWARDS = ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")  # the sources of rewards


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        positionals, openrlhf, *ours = parser._action_groups
        parser._action_groups = [*ours, positionals, openrlhf]
        print(parser.format_help())
        parser.exit()


def _short_help(prog: str, own: argparse.ArgumentParser | None) -> str:
    ours = argparse.ArgumentParser(
        prog, "%(prog)s --config YAML [flags]", add_help=False, epilog="The flags of OpenRLHF, such as "
        "--actor.model_name_or_path, --data.prompt_dataset, --rollout.batch_size and --actor.adam.lr, can be given "
        "too, on the command line and in YAML files: --help-all lists them.")  # fmt: skip
    if own is not None:
        own_flags = ours.add_argument_group("this command")
        for action in own._actions:
            own_flags._add_action(action)
    _add_flags(ours)
    return ours.format_help()


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files and help")
    group.add_argument("--config", metavar="YAML", nargs="+", action="extend", help="files of flags; a later file "
                       "overrules an earlier one, the command line overrules all files")  # fmt: skip
    group.add_argument(
        "--help-all", nargs=0, action=_HelpAll, dest=argparse.SUPPRESS, help="list the flags of OpenRLHF, too"
    )
    config.add_flags(parser)


def build_parser(prog: str, own: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """OpenRLHF's parser with this project's flags added, and with the help of the command's `own` flags."""
    parser = host.build_parser()
    parser.prog, parser.usage = prog, "%(prog)s --config YAML [flags]"
    _add_flags(parser)
    parser.set_defaults(**dict.fromkeys((*OUTPUTS, LOGGED_AS)))
    parser.error = refuse  # type: ignore[method-assign]
    parser.print_help = lambda file=None: print(  # type: ignore[method-assign]
        _short_help(prog, own), end="", file=file
    )
    return parser


def parse(
    argv: Sequence[str], prog: str = "bapo-openrlhf train", own: argparse.ArgumentParser | None = None
) -> SimpleNamespace:
    """OpenRLHF's nested namespace with `.algorithm` and the flags of `config.GROUPS`, checked without any data."""
    parser = build_parser(prog, own)
    options = flags_on(parser, argv)
    layers = Layers({path: dict(settings_of(path)) for path in options.get("config", [])}, options)
    words: list[str] = []
    for path, settings in layers.files.items():
        in_effect = [item for item in settings.items() if layers.last_file(item[0]) == path]
        try:
            of_file = list(as_words(parser, in_effect))
            parse_words(parser, of_file)
        except ConfigError as error:
            raise ConfigError(f"config {path}: {error}") from None
        words += of_file
    algorithm = layers.last("algorithm")[1] or None
    if algorithm is not None:
        if algorithm not in config.ALGORITHMS:
            allowed = ", ".join(config.ALGORITHMS)
            hint = file_hint(str(algorithm)) or did_you_mean(str(algorithm), config.ALGORITHMS)
            raise ConfigError(f"algorithm is {algorithm!r}; it must be one of {allowed}{hint}")
        words += [f"--{name}={value}" for name, value in layers.meaning(config.ALGORITHMS[algorithm])]
    layers.check_methods()
    flat = parse_words(parser, words + list(argv))
    flat.algorithm = algorithm
    if layers.critic_follows() and getattr(flat, ESTIMATOR) == "gae":
        for size in SIZES:
            setattr(flat, f"critic.{size}", getattr(flat, f"actor.{size}"))
    args = config.Arguments(**vars(_complete(flat)))
    args.chosen = layers.chosen(algorithm, args.adapt.method)
    return args


def flags_on(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags of a command line and their values, without those that are not on it."""
    nothing = object()
    into = argparse.Namespace(**{action.dest: nothing for action in parser._actions if action.dest != "config"})
    values = vars(parse_words(parser, argv, into))
    return {name: value for name, value in values.items() if value is not nothing and value is not None}


def _complete(flat: argparse.Namespace) -> SimpleNamespace:
    expand_home(flat)
    _check_rewards(flat)
    check_template("data.input_template", getattr(flat, "data.input_template"))
    check_values(vars(flat))
    ours = {
        prefix: kind(**{item.name: vars(flat).pop(f"{prefix}.{item.name}") for item in fields(kind)})
        for prefix, kind in config.GROUPS.items()
    }
    run = ours["run"]
    if getattr(flat, LOGGED_AS) is None:
        setattr(flat, LOGGED_AS, run.name)
    for name, folder in OUTPUTS.items():
        if getattr(flat, name) is None:
            setattr(flat, name, f"{run.dir}/{run.name}/{folder}")
    dataset = getattr(flat, "eval.dataset")
    if ours["adapt"].enabled:
        setattr(flat, "eval.dataset", None)  # OpenRLHF refuses one with a reward model
    args = host.validate(flat)
    args.eval.dataset = dataset
    for prefix, group in ours.items():
        if hasattr(args, prefix):
            vars(getattr(args, prefix)).update(vars(group))  # beside OpenRLHF's flags
        else:
            setattr(args, prefix, group)
    if args.adapt.enabled and not args.reward.remote_url and args.adapt.reward_range is None:
        args.adapt.reward_range = [config.MEASURED]
    args.run.faster = args.run.faster or ["all" if args.adapt.enabled else "none"]
    if args.adapt.enabled:
        args.adapt.check()
    return args


def _check_rewards(flat: argparse.Namespace) -> None:
    """Check that rewards have a source. Later, OpenRLHF takes the critic from the reward model's name if it has one."""
    if any(getattr(flat, name) for name in REWARDS):
        return
    message = (
        f"reward.remote_url is not set; it must be a .py file with reward_func, or an endpoint ({REWARDS[1]} and "
        f"{REWARDS[2]} are not set either)"
    )
    if flat.config and not getattr(flat, "actor.model_name_or_path"):
        files = " ".join(flat.config)
        message += (
            f"; {files} has neither rewards nor a model: if it is only for a method, name the file of a task before "
            f"it, as in --config configs/quickstart.yaml {files}"
        )
    raise ConfigError(message)


def as_words(parser: argparse.ArgumentParser, settings: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """The words of a command line that say the same as YAML settings, so that argparse checks types and choices."""
    flags = parser._option_string_actions
    for name, value in settings:
        action = flags.get(f"--{name}")
        if action is None and value is None and any(flag.startswith(f"--{name}.") for flag in flags):
            continue  # a section without any flag, such as one whose flags are all in comments
        if action is None:
            _check_section(name, value, flags)
            names = [flag[2:] for flag in flags if flag.startswith("--")]
            raise ConfigError(f"unknown flag {name}{did_you_mean(name, names)}")
        if name == "config":
            raise ConfigError("a config file cannot name another one")
        if is_switch(action):
            if as_switch(str(value)) is None:
                raise ConfigError(f"{name} is {value!r}; it must be true or false")
            yield f"--{name}={value}"
        elif isinstance(value, list):
            if action.nargs is None:
                hint = ", with commas between several names" if name in LISTS else ""
                raise ConfigError(f"{name} is {value}; it must be one value and not a list{hint}")
            yield f"--{name}"
            yield from map(str, value)
        elif value is not None:
            # It is one word, because otherwise argparse would take -1e-6 for a flag.
            yield from [f"--{name}={value}"] if action.nargs is None else [f"--{name}", str(value)]


def _check_section(name: str, value: Any, flags: Collection[str]) -> None:
    if section := sorted(flag.removeprefix(f"--{name}.") for flag in flags if flag.startswith(f"--{name}.")):
        some = ", ".join(section[:MOST_NAMED]) + ", ..." * (len(section) > MOST_NAMED)
        raise ConfigError(f"{name} is {value!r}; it must hold flags, each with its value: {some}")
    parent, _, last = name.rpartition(".")
    if f"--{parent}" in flags:
        raise ConfigError(
            f"{parent} holds {last}: {value}; it must be a value, or a list of values if it takes several"
        )

"""Methods by name or by file, and what their constructors get.

A method is a class. Its constructor can take `capacity`, `group_size`, `seed` and any --adapt flag, by name. Every
other parameter is an option of the method. It has a default, and --adapt.options sets it.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from numbers import Number
from pathlib import Path
from typing import Any

from bapo_openrlhf import user_file
from bapo_openrlhf.adapt.rewards import as_fraction
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.methods.base import AS_FIELDS, Method

SHARED = {"base", "registry", "stored_successes"}  # the files of this folder that hold no method


def _names() -> list[str]:
    """A file of this folder holds the method of its name. Those of BAPO come first."""
    files = [info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)]) if info.name not in SHARED]
    return sorted(files, key=lambda name: (not name.startswith("bapo"), name))


METHODS = _names()
# What is only a file in configs/methods: name | sentence | use | source.
VARIANTS = """
    bapo_mini_test | BAPO with c1 = 0 and c2 = c3 = 1/2. | Use it to have no thresholds to tune. | arXiv 2602.20722
    bapo_without_x2 | BAPO that never generates again. | Use it to see what this is worth. | arXiv 2602.20722, Table 1b
    bapo_without_x3 | BAPO that replays nothing. | Use it to see what replay is worth. | arXiv 2602.20722, Table 1b
    filter_only | GRPO or PPO that does not train on groups without a signal: BAPO without X2 and X3, with v = 1. | \
        Use it if training takes most of a step: it saves that, and has nothing to tune. | \
        arXiv 2602.20722, Eq. 5, first term
    skip_two_updates | GRPO with two updates a rollout that skips groups without a signal and divides by them. | \
        Use it first, without KL penalty and entropy bonus: it was ahead of GRPO and BAPO. | \
        this project, after arXiv 2402.03300
    bapo_replay_all | BAPO without X2 that replays all recent groups with a signal. | \
        Use it with twice as large batches as rollouts, if neither smaller ones nor two epochs are possible. | \
        this project, after arXiv 2602.20722
    bapo_fixed_thresholds | BAPO whose c2 and c3 do not move. | Use it to see what moving them is worth. | \
        arXiv 2602.20722, Fig. 6
    grpo_delayed | GRPO on every fresh group, with responses of weights that are up to 4 steps old. | \
        Use it as a baseline with BAPO's delay. | arXiv 2505.22257
    bounded_staleness | GRPO on every fresh group, with generation at most 4 steps ahead of training. | \
        Use it if generation and training should not wait for each other. | arXiv 2505.24298
    partial_rollouts | GRPO on every complete group; a long response goes on in the next step with newer weights. | \
        Use it if a few long responses hold up each step. | arXiv 2501.12599, Sec. 2.6.2
    gspo | One importance ratio for each response instead of each token, with any algorithm and method. | \
        Use it if the ratios of single tokens differ wildly, as in a mixture of experts. | arXiv 2507.18071
    vc_ppo | BA-PPO whose critic is pretrained and has a lambda of its own. | \
        Use it with a critic that begins without knowledge. | arXiv 2503.01491
    gated_reuse | Up to four epochs over a batch, which end before the gradient of the output head rises too fast. | \
        Use it with several epochs, if some of them may harm. | arXiv 2605.19425
    critic_generated | BA-PPO whose critic trains on all groups, and is used only if it beats the group's mean. | \
        Use it if a critic explains nothing behind the filter. | this project; arXiv 2604.19485
    dapo | Plain OpenRLHF that draws prompts until the batch is full of groups with signal. | \
        Use it as a baseline that drops groups without signal and has no buffers. | arXiv 2503.14476
    dapo_with_buffer | BAPO that draws prompts until its batch and its replay buffer are enough. | \
        Use it if few groups have a signal and every step should have a full batch. | \
        this project, after arXiv 2503.14476
"""
CHOICE = ("method", "options")  # --adapt flags that choose a method and are no setting of it
KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", Fraction: "a number"}


def _variants() -> dict[str, tuple[str, ...]]:
    rows = [row.split(" | ") for row in VARIANTS.strip().splitlines()]
    return {name.strip(): tuple(" ".join(cell.split()) for cell in cells) for name, *cells in rows}


def file_hint(name: str) -> str:
    """The end of an error about a name that is only the name of a file in configs/methods; otherwise nothing."""
    if name == "bapo" or name not in {*METHODS, *_variants()}:
        return ""
    return f"; {name} is a file of flags: name configs/methods/{name}.yaml after your own file in --config"


def overview() -> dict[str, tuple[str, ...]]:
    """Sentence, use and source by name: all methods, then the variants that are no value of --adapt.method."""
    kinds = {name: method_class(name) for name in METHODS}
    rows = {name: ((kind.__doc__ or "").partition("\n")[0], kind.USE, kind.SOURCE) for name, kind in kinds.items()}
    return rows | _variants()


def method_class(name: str) -> type[Method]:
    """The class that --adapt.method stands for: one of METHODS, or FILE.py:CLASS; a ConfigError if there is none."""
    if name in METHODS:
        return _built_in(name)
    place, colon, attribute = name.rpartition(":")
    if not (colon and place.endswith(".py") and attribute):
        raise ConfigError(
            f"adapt.method is {name}; it must be none, {', '.join(METHODS)}, or FILE.py:CLASS{file_hint(name)}"
        )
    kind = getattr(user_file.load("adapt.method", Path(place)), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ConfigError(
            f"adapt.method is {name}; {place} has no class {attribute} that is a bapo_openrlhf.methods.Method"
        )
    abstract_names = sorted(kind.__abstractmethods__)
    if abstract_names:
        raise ConfigError(f"adapt.method is {name}; {attribute} lacks {', '.join(abstract_names)}")
    return kind


def _built_in(file: str) -> type[Method]:
    module = importlib.import_module(f"bapo_openrlhf.methods.{file}")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Method)]
    [method] = [kind for kind in kinds if kind.__module__ == module.__name__]
    return method


def build(kind: type[Method], flags: Mapping[str, Any], options: Sequence[str]) -> Method:
    """A method for this run.

    Args:
        flags: capacity (B), group_size (G), seed, signal_between and the --adapt flags, by name. Those that are no
            parameter of the constructor are ignored.
        options: The method's options, each as NAME=VALUE.

    Raises:
        ConfigError: The method has no such option or refuses its value, or its constructor cannot be called.
    """
    flags = {name: value for name, value in flags.items() if name not in CHOICE}
    parameters = inspect.signature(kind).parameters
    defaults = _options(kind, parameters, flags)
    values = {name: flags[name] for name in parameters if name in flags}
    for word in options:
        name, equals, text = word.partition("=")
        if not equals or name not in defaults:
            choices = ", ".join(f"{option}={default}" for option, default in defaults.items()) or "none"
            raise ConfigError(f"adapt.options has {word!r}; {kind.__name__} takes NAME=VALUE of these: {choices}")
        values[name] = _value(word, text, defaults[name])
    try:
        return kind(**values)
    except Exception as error:  # a constructor of the user's may fail in any way
        raise ConfigError(f"adapt.method {kind.__name__} cannot be made: {one_line(error)}") from error


def takes(kind: type[Method], flag: str) -> bool:
    """Whether a method reads an --adapt flag, by its name without "adapt."."""
    return flag in inspect.signature(kind).parameters


def _options(
    kind: type[Method], parameters: Mapping[str, inspect.Parameter], flags: Mapping[str, Any]
) -> dict[str, Any]:
    constructor = f"adapt.method {kind.__name__}: its constructor's"
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{constructor} {parameter} says nothing; it must name each parameter ({AS_FIELDS})")
        if name in flags and not _alike(parameter.default, flags[name]):
            raise ConfigError(
                f"{constructor} {name} has the default {parameter.default!r}, and would get {flags[name]!r}, because a "
                "parameter with the name of an --adapt flag gets its value; give it another name"
            )
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in flags}
    names = [name for name, default in defaults.items() if default is inspect.Parameter.empty]
    if names:
        raise ConfigError(f"{constructor} {', '.join(names)} must have a default, or be one of {', '.join(flags)}")
    return defaults


def _alike(default: Any, value: Any) -> bool:
    if default is inspect.Parameter.empty or default is None:
        return True
    kinds = [Number if isinstance(one, Number) and not isinstance(one, bool) else type(one) for one in (default, value)]
    return kinds[0] is kinds[1]


def _value(word: str, text: str, default: Any) -> Any:
    if not isinstance(default, (*KINDS, str)):
        raise ConfigError(
            f"adapt.options has {word!r}; its default {default!r} must be a number, true, false or a text, because an "
            "option has the type of its default"
        )
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        make: Callable[[str], Any] = as_fraction if isinstance(default, Fraction) else type(default)
        return make(text)
    except (KeyError, ValueError):
        raise ConfigError(f"adapt.options has {word!r}; it must be {KINDS[type(default)]}") from None

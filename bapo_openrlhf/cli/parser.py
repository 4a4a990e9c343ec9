"""The parsers of all commands: one way to name a bad flag, and the flag that was meant."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from bapo_openrlhf.errors import ConfigError, refuse
from bapo_openrlhf.user_file import at_home

# The last parts of names that users of TRL, verl or older versions of OpenRLHF type, by the flag that they mean. A name
# that is the end of one of the known flags need not be here, such as lora_rank (ds.lora.rank).
MEANT = {
    "actor.adam.lr": "actor_learning_rate learning_rate lr",
    "actor.eps_clip": "cliprange epsilon",
    "actor.eps_clip_low_high": "eps_clip_high",
    "actor.lr_warmup_ratio": "warmup_ratio",
    "actor.max_norm": "max_grad_norm",
    "actor.model_name_or_path": "model model_name model_path pretrain",
    "actor.num_gpus_per_node": "gpus n_gpus_per_node num_gpus",
    "algo.kl.init_coef": "beta init_kl_coef kl_coef kl_loss_coef",
    "bapo_grpo or ba_ppo": "bapo",  # --algorithm
    "ckpt.load_enable": "resume resume_from_checkpoint",
    "ckpt.output_dir": "save_path",
    "critic.adam.lr": "critic_learning_rate",
    "data.max_len": "prompt_max_len",
    "data.max_samples or train.num_episodes": "max_steps",
    "data.prompt_dataset": "data dataset prompt_data",
    "ds.lora.rank": "lora_r",
    "logger.wandb.key": "use_wandb wandb",
    "reward.remote_url": "reward_fn reward_function",
    "rollout.max_new_tokens": "generate_max_len max_completion_length max_response_length max_tokens",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "group_size n num_generations rollout_n",
    "train.batch_size": "ppo_mini_batch_size",
    "train.max_epochs": "ppo_epochs",
    "train.micro_batch_size": "micro_train_batch_size per_device_train_batch_size",
    "train.num_episodes": "epochs num_epochs num_train_epochs total_epochs",
}
ALIASES = {alias: flag for flag, aliases in MEANT.items() for alias in aliases.split()}
NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")  # argparse's own takes -1e-6 for a flag


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """The end of an error: the known names that may be meant, or "". Either all flags have dashes here, or none."""
    names = list(known_names)
    dashes, group, last = re.fullmatch(r"(-*)(?:(.*)\.)?(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    last = last.replace("-", "_")
    flags = []
    for alias in ALIASES.get(last, "").split(" or "):
        of_group = f"{dashes}{group}.{alias.partition('.')[2]}"  # critic.lr is critic.adam.lr
        flags += [of_group if of_group in names else dashes + alias]
    candidates = (
        [one for one in flags if one in names]
        or [one for one in names if _plain(name) in _ends(one)]
        or difflib.get_close_matches(name, [one for one in names if one.rpartition(".")[2] == last], n=3, cutoff=0)
        or difflib.get_close_matches(name, names, n=1)
    )
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _plain(name: str) -> str:
    """A name without capital letters, dots and dashes: `BA-PPO` is `ba_ppo`."""
    return re.sub(r"[.-]", "_", name.lstrip("-").lower())


def _ends(name: str) -> list[str]:
    """The whole of a name, and what it ends with from a dot on if there is another dot, each as `_plain`."""
    parts = name.lstrip("-").split(".")
    return [_plain(".".join(parts[start:])) for start in range(max(len(parts) - 1, 1))]


def is_switch(action: argparse.Action | None) -> bool:
    """Whether a flag needs no value, because it turns something on or off."""
    return isinstance(action, (argparse._StoreTrueAction, argparse._StoreFalseAction))


def _take_switches(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], dict[str, bool]]:
    """The words without the switches, and the value of each, which may follow it: `--train.colocate_all false`."""
    takes_words = any(not action.option_strings for action in parser._actions)
    others, switches, rest = [], {}, list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        action = parser._option_string_actions.get(flag)
        if not is_switch(action):
            others.append(word)
            continue
        if not equals and rest and (as_switch(rest[0]) is not None or not (takes_words or rest[0].startswith("-"))):
            text, equals = rest.pop(0), "="
        value = as_switch(text) if equals else True
        if value is None:
            raise ConfigError(f"{flag} is {text!r}; it must be true or false")
        switches[action.dest] = bool(action.const) == value
    return others, switches


def as_switch(text: str) -> bool | None:
    """The value of a switch, with YAML's words for it; None if it is not one of them."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return None
    return value if isinstance(value, bool) else None


def parse_words(
    parser: argparse.ArgumentParser, words: Sequence[str], into: argparse.Namespace | None = None
) -> argparse.Namespace:
    """Parse a command line. A ConfigError has the flag that may be meant. Flags of `into` keep their values."""
    line = words
    words, switches = _take_switches(parser, words)
    parser._negative_number_matcher = NUMBER  # type: ignore[attr-defined]
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    try:
        options, rest = parser.parse_known_args(words, into)
    except ConfigError as error:
        ambiguous = re.match(r"ambiguous option: (--(?:.*\.)?([^ =]+))", str(error).partition(" could")[0])
        if ambiguous is None or ambiguous[2] not in ALIASES:
            raise
        raise ConfigError(f"unknown flag {ambiguous[1]}{did_you_mean(ambiguous[1], flags)}") from None
    if not rest:
        vars(options).update(switches)
        return options
    for word in rest:
        if word.startswith("-") and not NUMBER.match(word):
            flag = "--" + word.partition("=")[0].lstrip("-")
            raise ConfigError(f"unknown flag {word.partition('=')[0]}{did_you_mean(flag, flags)}")
    raise ConfigError(f"unexpected word {rest[0]!r}; {_why_unexpected(rest[0], line, flags)}")


def _why_unexpected(word: str, words: Sequence[str], flags: Sequence[str]) -> str:
    if word.endswith((".yaml", ".yml")) and "--config" in flags:
        return f"did you mean --config {word}?"
    if any(one.startswith("--") for one in words[: words.index(word)]):
        return "the flag before it takes fewer values"
    return "the command takes fewer words; a name with spaces must be in quotes"


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated flags. Bad flags raise ConfigError, and do not end the process.

    `doc` is that of the command's file: "`bapo-openrlhf NAME`: DESCRIPTION". `~` in a Path is the home folder.
    """

    def __init__(self, prog: str, doc: str, **settings: Any) -> None:
        text = doc.partition(": ")[2]
        super().__init__(prog=prog, description=text[:1].upper() + text[1:], allow_abbrev=False, **settings)
        self.register("type", Path, at_home)

    error = staticmethod(refuse)  # type: ignore[assignment]

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse the words of a command line; see `parse_words`."""
        return parse_words(self, words)

"""Find out before it loads that a reward model gives no score, or reads other tokens than the actor writes."""

from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import Shapes, config_of, read_json
from bapo_openrlhf.user_file import at_home

FLAG = "reward.model_name_or_path"


def check_reward_model(args: SimpleNamespace, weights: Shapes) -> None:
    """Check the head and the tokens of `--reward.model_name_or_path`, as far as both models are folders here.

    OpenRLHF would give a model without a head a random one, and only log it.

    Args:
        args: OpenRLHF's (nested) arguments.
        weights: Shapes of its weights; none if they are not known.

    Raises:
        ConfigError: The message names the folder, and what it lacks or has.
    """
    name, actor = args.reward.model_name_or_path, args.actor.model_name_or_path
    folder = at_home(name)
    config = config_of(f"{FLAG} is {name}", folder) if folder.is_dir() else {}
    prefix = config.get("value_head_prefix", args.ds.value_head_prefix)
    if weights and f"{prefix}.weight" not in weights:
        raise ConfigError(
            f"{FLAG} is {name}; it has no weights {prefix}.weight, the head that gives a score, so it is no reward "
            "model, or --ds.value_head_prefix must name its head"
        )
    if weights and (scores := weights[f"{prefix}.weight"][0]) != 1:
        raise ConfigError(f"{FLAG} is {name}; its head {prefix}.weight gives {scores} scores, and it must give one")
    written, read = _tokens_of(at_home(actor)), _tokens_of(folder)
    for number, token in written.items() if read else ():
        if read.get(number) != token:
            raise ConfigError(
                f"{FLAG} is {name}; its token {number} is {read.get(number)!r}, and it must be {token!r} as in "
                f"actor.model_name_or_path {actor}, because it reads the actor's tokens. A reward server may have "
                "other tokens (docs/rewards.md)"
            )


def _tokens_of(folder: Path) -> dict[int, str]:
    """The tokens of a folder's tokenizer by their numbers; none if it has no tokenizer.json."""
    tokenizer = read_json(folder / "tokenizer.json")
    if not tokenizer:
        return {}
    vocabulary = tokenizer["model"]["vocab"]  # numbers by token, or in a unigram model pairs of token and score
    numbers = vocabulary if isinstance(vocabulary, dict) else {token: n for n, (token, _) in enumerate(vocabulary)}
    added = {one["id"]: one["content"] for one in tokenizer.get("added_tokens", [])}
    return {number: token for token, number in numbers.items()} | added

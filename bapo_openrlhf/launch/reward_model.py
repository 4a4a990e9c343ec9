"""Find out before it loads that a reward model gives no score, or reads other tokens than the actor writes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError

FLAG = "reward.model_name_or_path"


def check_reward_model(args: SimpleNamespace) -> None:
    """Check the head and the tokens of `--reward.model_name_or_path`, as far as both models are folders here.

    OpenRLHF would give a model without a head a random one, and only log it.

    Raises:
        ConfigError: The message names the folder, and what it lacks or has.
    """
    name, actor = args.reward.model_name_or_path, args.actor.model_name_or_path
    folder = Path(name).expanduser()
    prefix = (_read(folder / "config.json") or {}).get("value_head_prefix", args.ds.value_head_prefix)
    weights = _weights_of(folder)
    if weights and f"{prefix}.weight" not in weights:
        raise ConfigError(
            f"{FLAG} is {name}; it has no weights {prefix}.weight, the head that gives a score, so it is no reward "
            "model, or --ds.value_head_prefix must name its head"
        )
    written, read = _tokens_of(Path(actor).expanduser()), _tokens_of(folder)
    for number, token in written.items() if read else ():
        if read.get(number) != token:
            raise ConfigError(
                f"{FLAG} is {name}; its token {number} is {read.get(number)!r}, and it must be {token!r} as in "
                f"actor.model_name_or_path {actor}, because it reads the actor's tokens. A reward server may have "
                "other tokens (docs/rewards.md)"
            )


def _read(path: Path) -> Any:
    """The content of a JSON file; None if there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _weights_of(folder: Path) -> set[str]:
    """Names of the tensors in safetensors files; none if they are in another form, or on the model hub."""
    index = _read(folder / "model.safetensors.index.json")
    if index:
        return set(index["weight_map"])
    path = folder / "model.safetensors"
    if not path.is_file():
        return set()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return set(json.loads(file.read(length)))


def _tokens_of(folder: Path) -> dict[int, str]:
    """The tokens of a folder's tokenizer by their numbers; none if it has no tokenizer.json."""
    tokenizer = _read(folder / "tokenizer.json")
    if not tokenizer:
        return {}
    vocabulary = tokenizer["model"]["vocab"]  # numbers by token, or in a unigram model pairs of token and score
    numbers = vocabulary if isinstance(vocabulary, dict) else {token: n for n, (token, _) in enumerate(vocabulary)}
    added = {one["id"]: one["content"] for one in tokenizer.get("added_tokens", [])}
    return {number: token for token, number in numbers.items()} | added

"""Find out before it loads that a critic or a reward model reads other tokens than the actor writes."""

from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import config_of, positions_of, read_json
from bapo_openrlhf.user_file import at_home


def check_same_tokens(args: SimpleNamespace, flag: str, name: str) -> None:
    """Check that a model reads the actor's tokens and has an embedding for each position, if both are folders here."""
    folder, actor = at_home(name), at_home(args.actor.model_name_or_path)
    if not (folder.is_dir() and actor.is_dir()):
        return
    whole = config_of(f"{flag} is {name}", folder)
    config = whole.get("text_config") or whole
    written, read = _tokens_of(actor), _tokens_of(folder)
    as_actor = f"as in actor.model_name_or_path {args.actor.model_name_or_path}, because it reads the actor's tokens"
    for number, token in written.items() if read else ():
        if read.get(number) != token:
            raise ConfigError(
                f"{flag} is {name}; its token {number} is {read.get(number)!r}, and it must be {token!r} {as_actor}. A "
                "reward server may have other tokens (docs/rewards.md)"
            )
    size, most = config.get("vocab_size"), max(written, default=-1)
    if size is not None and most >= size:
        raise ConfigError(
            f"{flag} is {name}; vocab_size in its config.json is {size}, and it must be at least {most + 1} to have "
            f"the token {written[most]!r} {as_actor}"
        )
    if args.data.max_len > positions_of(config):
        raise ConfigError(
            f"data.max_len is {args.data.max_len}; it must be at most {positions_of(config):g}, the positions of "
            f"{flag} {name}"
        )


def _tokens_of(folder: Path) -> dict[int, str]:
    tokenizer = read_json(folder / "tokenizer.json")
    if not tokenizer:
        return {}
    vocabulary = tokenizer["model"]["vocab"]  # numbers by token, or in a unigram model pairs of token and score
    numbers = vocabulary if isinstance(vocabulary, dict) else {token: n for n, (token, _) in enumerate(vocabulary)}
    added = {one["id"]: one["content"] for one in tokenizer.get("added_tokens", [])}
    return {number: token for token, number in numbers.items()} | added

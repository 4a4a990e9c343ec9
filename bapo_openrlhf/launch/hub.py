"""Find models that are neither on this machine nor on the model hub, before a run starts."""

from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.user_file import start_of


def check_hub_models(args: SimpleNamespace) -> None:
    """Get the config.json of each model that is not a folder: from the hub, or from what was downloaded before.

    `check` does not do this, because it needs no network.

    Raises:
        ConfigError: There is none. The message names the flag and the model.
    """
    for model in Flags.of(args).loaded:
        if model == "ref":  # it is the actor
            continue
        flag = f"{model}.model_name_or_path"
        for name in (getattr(args, model).model_name_or_path or "").split(","):
            if not Path(name).is_dir() and not args.use_ms:
                _check(flag, name)


def _check(flag: str, name: str) -> None:
    from transformers.utils import cached_file

    try:
        cached_file(name, "config.json")
    except OSError as error:
        raise ConfigError(
            f"{flag} is {name}; it is not a folder{start_of(Path(name))}, and the model hub gives no config.json of "
            f"this name: {one_line(error)}"
        ) from None

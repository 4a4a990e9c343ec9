"""Find models that are neither on this machine nor on the model hub, before a run starts."""

from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.user_file import start_of

SECONDS = 20  # to wait for the hub


def check_hub_models(args: SimpleNamespace) -> None:
    """Ask the cache, then the hub, for each model that is no folder. `check` does not, because it needs no network."""
    for model in Flags.of(args).loaded:
        if model == "ref":  # it is the actor
            continue
        flag = f"{model}.model_name_or_path"
        for name in (getattr(args, model).model_name_or_path or "").split(","):
            if not Path(name).is_dir() and not args.use_ms:
                _check(flag, name)


def _check(flag: str, name: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=SECONDS)
    except Exception as error:  # of the hub's library, or of its connection
        raise ConfigError(
            f"{flag} is {name}; it is not a folder{start_of(Path(name))}, it was not downloaded before, and the model "
            f"hub does not give it: {one_line(error)}"
        ) from None

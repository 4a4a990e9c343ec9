"""Choose the checkpoint from which a run continues, before anything loads."""

import sys
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import CheckpointError


def choose_checkpoint(args: SimpleNamespace) -> str | None:
    """Point OpenRLHF to the newest whole checkpoint if `--ckpt.load_enable` asks for one, and return its tag.

    A checkpoint that a crash left unfinished is deleted, because it can never be loaded. A damaged checkpoint is named
    on standard error and passed over. If there is no checkpoint at all, the run starts from the beginning, as in
    OpenRLHF.

    Returns:
        The tag of the checkpoint; None if the run starts from the beginning.

    Raises:
        ConfigError: No checkpoint is whole; or the checkpoints were written without batch adaptation; or a new run
            would write next to the checkpoints of an earlier run; or the folder cannot be read.
    """
    if not args.adapt.enabled:
        return None
    try:
        store = CheckpointStore(Path(args.ckpt.path), critic=bool(args.critic.model_name_or_path))
        if args.ckpt.load_enable:
            return _choose(args, store)
        if tags := store.tags():
            raise ConfigError(
                f"ckpt.path is {args.ckpt.path}, which has checkpoints of an earlier run (newest: {tags[0]}); continue "
                "from there with --ckpt.load_enable, or give another --ckpt.path, or delete them"
            )
        return None
    except CheckpointError as error:
        raise ConfigError(f"ckpt.path is {args.ckpt.path}; {error}") from error


def _choose(args: SimpleNamespace, store: CheckpointStore) -> str | None:
    for tag in store.remove_unfinished():
        _report(f"{tag} was not finished: removed")
    tag = store.newest_whole(_report)
    if tag is not None:
        store.point_to(tag)
        _report(f"resuming from {tag}")
    elif store.has_foreign():
        raise ConfigError(
            f"ckpt.path is {args.ckpt.path}; its checkpoints were written without batch adaptation, "
            "and have no buffers to resume with"
        )
    elif store.tags():
        raise ConfigError(f"ckpt.path is {args.ckpt.path}; none of its checkpoints is whole: {', '.join(store.tags())}")
    else:
        _report("there is no checkpoint: starting from the beginning")
        args.ckpt.load_enable = False
    return tag


def _report(text: str) -> None:
    print(f"ckpt.load_enable: {text}", file=sys.stderr)

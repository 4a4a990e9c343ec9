"""Convert a run's newest checkpoint, so that another number of ranks can resume it.

DeepSpeed's own converter puts the parts of the ranks together. Its result is added to the checkpoint, whose other files
stay as they are, so the same number of ranks can still resume it without the universal format.
"""

import shutil
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError, RunError, one_line
from bapo_openrlhf.flags.conflicts import UNIVERSAL as RULES
from bapo_openrlhf.flags.rule import Flags, check_rules
from bapo_openrlhf.launch.resume import SETTINGS, SETTINGS_KIND
from bapo_openrlhf.record.checkpoint_store import ADAPT, CRITIC, OF_A_RANK, UNIVERSAL, CheckpointStore
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.record.state_file import CheckpointError, read_document

UNFINISHED = "_universal"  # in ckpt.path: what a conversion writes until it is whole
EXTRACTING, MERGING = 4, 2  # processes of DeepSpeed's converter, as many as its own command takes


def convert(path: Path) -> str:
    """Convert the newest whole checkpoint of a run, unless that was done.

    Raises:
        ConfigError: No checkpoint is whole; or it cannot be converted; or the run goes on. Nothing was changed.
        RunError: The conversion failed. The checkpoint is as it was.
    """
    field = f"CKPT is {path}"
    if not (path / ADAPT).is_dir():
        raise ConfigError(
            f"{field}; it must be the folder with the checkpoints of a run with batch adaptation, its ckpt.path"
        )
    with owned(path, field=field, what="run", instead="stop it"):
        try:
            return _convert(CheckpointStore(path, critic=(path / CRITIC).is_dir()), field)
        except CheckpointError as error:
            raise ConfigError(f"{field}; {error}") from error


def _convert(store: CheckpointStore, field: str) -> str:
    tag = store.newest_whole(lambda text: print(text, file=sys.stderr))
    if tag is None:
        raise ConfigError(f"{field}; none of its checkpoints is whole: {', '.join(store.tags()) or 'there is none'}")
    if store.is_universal(tag):
        return tag
    settings = store.path / SETTINGS
    if settings.exists():  # a run of an older version has none
        flags = read_document(settings, SETTINGS_KIND)["config"] | {"ds.use_universal_ckpt": True}
        check_rules(RULES, Flags(flags))
    if not all(store.ranks(tag).values()):
        raise ConfigError(
            f"{field}; {tag} has no part for each rank (ds.zero_stage 0), and DeepSpeed converts only these"
        )
    unfinished = store.path / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        converted = {part: _converted(store.folder(tag, part), unfinished / part) for part in store.models}
        store.add_universal(tag, converted)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return tag


def _converted(source: Path, folder: Path) -> Path:
    machine.prepare()
    if _has_no_state(source):
        raise ConfigError(
            f"{source} has no state of an optimizer, because no batch has trained this model yet; only the same number "
            "of ranks can resume it"
        )
    from deepspeed.checkpoint import ds_to_universal

    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(folder / "universal"),  # DeepSpeed writes a file next to it
        num_extract_workers=EXTRACTING,
        num_merge_workers=MERGING,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # what only Megatron's checkpoints have
    )
    try:
        with redirect_stdout(sys.stderr):
            ds_to_universal.main(arguments)
    except Exception as error:
        raise RunError(f"{source}: DeepSpeed could not convert it: {one_line(error)}") from error
    return folder / "universal" / UNIVERSAL


def _has_no_state(source: Path) -> bool:
    """Whether the optimizer of a model has no state. Under ZeRO 1 and 2 it gets one in its first step."""
    import torch

    file = next(source.glob(f"*{OF_A_RANK}"))
    saved: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    return saved["optimizer_state_dict"].get("base_optimizer_state", {"state": True})["state"] in ({}, [])

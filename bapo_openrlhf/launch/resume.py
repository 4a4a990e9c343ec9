"""Choose how a run starts, before anything loads: from a checkpoint, in a new folder, or in place of an earlier run."""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.paths import check_written, run_folder
from bapo_openrlhf.flags.resumable import may_change
from bapo_openrlhf.launch.settings import RANKS, Settings, changes, is_mended
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.checkpoint_store import ADAPT, MANIFEST, CheckpointStore, step_of
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.record.state_file import CheckpointError, read_document, write_document

SETTINGS, SETTINGS_KIND = "settings.json", "bapo_openrlhf settings"  # of the run's last start, in ckpt.path


@contextmanager
def own_folders(args: SimpleNamespace) -> Iterator[None]:
    """Own the run's folder and `ckpt.path` for the time of the block.

    Raises:
        ConfigError: Another process writes to one of them, and nothing of its run was changed; or a folder of the run
            cannot be one.
    """
    check_written(args)
    folders = {run_folder(args): ("run.name", args.run.name), Path(args.ckpt.path): ("ckpt.path", args.ckpt.path)}
    places = {folder.resolve(): flag for folder, flag in folders.items()}  # the two may be one
    with ExitStack() as stack:
        for folder, (flag, value) in places.items():
            owns = owned(folder, field=f"{flag} is {value}", what="run", instead=f"give another --{flag}")
            stack.enter_context(owns)
        yield


def choose_start(args: SimpleNamespace) -> tuple[str | None, bool]:
    """Choose the checkpoint, and check that the run does not write over an earlier one.

    Returns:
        The tag of the checkpoint, as `choose_checkpoint` returns it, and whether the run continues an earlier one.

    Raises:
        ConfigError: The run cannot start. Nothing of an earlier run was changed.
    """
    asked = args.ckpt.load_enable
    if not asked:
        _check_free(args)
    tag = choose_checkpoint(args)
    # Without batch adaptation OpenRLHF itself looks for a checkpoint.
    resumes = args.ckpt.load_enable and (args.adapt.enabled or (Path(args.ckpt.path) / "_actor").exists())
    if asked and not resumes and (args.run.overwrite or (run_folder(args) / record.SUMMARY).exists()):
        _check_free(args)  # A run that did not end, and has no checkpoint, starts again from the beginning.
    return tag, resumes


def _check_free(args: SimpleNamespace) -> None:
    """Check that the run's folders have no earlier run, or that all of it may be deleted."""
    folder, output = run_folder(args), Path(args.ckpt.output_dir)
    if args.run.overwrite:
        for flag in ("actor", "critic", "reward"):
            model = Path(getattr(args, flag).model_name_or_path or "/")
            if any(model.resolve().is_relative_to((folder / name).resolve()) for name in record.OTHERS):
                raise ConfigError(
                    f"{flag}.model_name_or_path is {model}, which --run.overwrite would delete; give another --run.name"
                )
    elif record.holds_run(folder):
        raise ConfigError(
            f"run.name is {args.run.name}, and {folder} already has a run; give another --run.name, or replace that "
            "run with --run.overwrite, or continue from its newest checkpoint with --ckpt.load_enable"
        )
    elif (output / "config.json").exists():
        raise ConfigError(
            f"ckpt.output_dir is {output}, which already has a model; give another --ckpt.output_dir, or write over "
            "that model with --run.overwrite"
        )


def choose_checkpoint(args: SimpleNamespace) -> str | None:
    """Point OpenRLHF to the newest whole checkpoint if `--ckpt.load_enable` asks for one, and return its tag.

    `ds.use_universal_ckpt` is True afterwards only if that checkpoint is loaded in DeepSpeed's universal format.

    A checkpoint that a crash left unfinished is deleted, because it can never be loaded. A damaged checkpoint is named
    on standard error and passed over. If there is no checkpoint at all, the run starts from the beginning, as in
    OpenRLHF.

    Returns:
        The tag of the checkpoint; None if the run starts from the beginning.

    Raises:
        ConfigError: No checkpoint is whole; or the checkpoints were written without batch adaptation; or by another
            number of ranks, and cannot be loaded by this one; or a new run would write next to the checkpoints of an
            earlier run; or the folder cannot be read.
    """
    if not args.adapt.enabled:
        return None
    try:
        store = _store(args)
        if args.ckpt.load_enable:
            return _choose(args, store)
        # With --run.overwrite, checkpoints in the run's folder are deleted together with the earlier run.
        replaced = args.run.overwrite and store.path == run_folder(args) / record.CHECKPOINTS
        if (tags := store.tags()) and not replaced:
            raise ConfigError(
                f"ckpt.path is {args.ckpt.path}, which has checkpoints of an earlier run (newest: {tags[0]}); continue "
                "from there with --ckpt.load_enable, or give another --ckpt.path, or delete them"
            )
        return None
    except CheckpointError as error:
        raise ConfigError(f"ckpt.path is {args.ckpt.path}; {error}") from error


def compare_with_beginning(args: SimpleNamespace, now: Settings, tag: str | None) -> dict[str, tuple[Any, Any]]:
    """Compare the settings of a run that resumes with those of its last start.

    Args:
        args: Arguments of the run.
        now: Its settings.
        tag: The checkpoint that was chosen; None if OpenRLHF chooses it.

    Returns:
        What changed and may do so: the old and the new value by flag. It is also said on standard error.

    Raises:
        ConfigError: Something changed that must not. The message names each flag with both values.
    """
    file = Path(args.ckpt.path) / SETTINGS
    try:
        if not file.exists():
            _report(f"{file} is not there, so it is not known whether the run was begun with the same settings")
            return {}
        before = read_document(file, SETTINGS_KIND)
    except (CheckpointError, OSError) as error:
        where = f"ckpt.path is {args.ckpt.path}; {error}"
        raise ConfigError(f"{where}; if that file is deleted, the run goes on and nothing is compared") from None
    changed = changes(before, now)
    has_weights = tag is not None and any((file.parent / ADAPT / tag).glob("rollout_weights_rank*"))
    # Ranks were compared with those that wrote the checkpoint, if it tells them.
    ranks = RANKS if tag is not None and all(_store(args).ranks(tag).values()) else ()
    refused = {
        flag: pair
        for flag, pair in changed.items()
        if not (may_change(flag) or is_mended(flag, *pair) or flag in ranks)
        or (flag == "vllm.tensor_parallel_size" and has_weights)
    }
    if refused:
        said = "; ".join(f"{flag} is {new}, and was {old}" for flag, (old, new) in refused.items())
        raise ConfigError(
            f"ckpt.load_enable continues a run as it was begun, but {said}; give the old values, or start a new run "
            "from the model that was trained so far; docs/reliability.md lists what may change"
        )
    for flag, (old, new) in changed.items():
        _report(f"from step {next_step(args)} on, {flag} is {new}, and was {old}")
    return changed


def keep_settings(args: SimpleNamespace, settings: Settings) -> None:
    """Write the settings next to the checkpoints, if there may be any."""
    ckpt = args.ckpt
    if not ckpt.disable_ds:  # a signal may ask for a checkpoint in any run
        Path(ckpt.path).mkdir(parents=True, exist_ok=True)
        write_document(Path(ckpt.path) / SETTINGS, SETTINGS_KIND, settings)


def next_step(args: SimpleNamespace) -> int:
    """The first step after the checkpoint from which the run goes on; 1 if there is none."""
    latest = Path(args.ckpt.path) / "_actor" / "latest"  # DeepSpeed writes it last, so a crash may leave none
    if not latest.exists():
        return 1
    text = latest.read_bytes()
    match = re.search(rb"global_step([0-9]+)$", text)
    if match is None:
        raise ConfigError(f"ckpt.path is {args.ckpt.path}; {latest} names no checkpoint, but {text[:40]!r}")
    return int(match[1]) + 1


def saved_step(args: SimpleNamespace) -> int:
    """The step of the newest checkpoint that was finished; 0 if there is none. Its files are not read."""
    if not args.adapt.enabled:
        return next_step(args) - 1
    store = _store(args)
    finished = (tag for tag in store.tags() if (store.folder(tag) / MANIFEST).exists())
    return next((step_of(tag) for tag in finished), 0)


def products_by_step(args: SimpleNamespace, way: str, *, resumes: bool) -> dict[str, str]:
    """How the run multiplies bfloat16 matrices (`cpu.products.way`), by the step from which it does so.

    If an earlier part of the run did it the other way, this is said on standard error.

    Args:
        args: Arguments of the run. A run that resumes has chosen its checkpoint.
        way: How this part of the run does it.
        resumes: Whether the run continues an earlier one.
    """
    if not resumes:
        return {"1": way}
    first = next_step(args)
    earlier = record.read_run(run_folder(args)).get("bf16_products", {})
    kept = {step: before for step, before in earlier.items() if int(step) < first}
    if not kept or list(kept.values())[-1] == way:
        return kept or {str(first): way}
    _report(
        f"the run multiplied bfloat16 matrices the way {list(kept.values())[-1]!r}, and on this CPU it goes on with "
        f"{way!r}. So its numbers are not exactly those of a run that stays on one kind of CPU"
    )
    return kept | {str(first): way}


def _store(args: SimpleNamespace) -> CheckpointStore:
    return CheckpointStore(Path(args.ckpt.path), critic=bool(args.critic.model_name_or_path))


def _choose(args: SimpleNamespace, store: CheckpointStore) -> str | None:
    for tag in store.remove_unfinished():
        _report(f"{tag} was not finished: removed")
    tag = store.newest_whole(_report)
    if tag is not None:
        args.ds.use_universal_ckpt = _loads_universal(args, store, tag)
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


def _loads_universal(args: SimpleNamespace, store: CheckpointStore, tag: str) -> bool:
    """Whether the checkpoint is loaded in DeepSpeed's universal format.

    Raises:
        ConfigError: Another number of ranks wrote it, and the universal format is missing or was not asked for.
    """
    asked, there = args.ds.use_universal_ckpt, store.is_universal(tag)
    if asked and there:
        return True
    for part, wrote in store.ranks(tag).items():
        model = part.removeprefix("_")
        of_model = getattr(args, model)
        ranks = of_model.num_nodes * of_model.num_gpus_per_node
        if wrote and wrote != ranks:
            convert = "" if there else f"convert it with `bapo-openrlhf universal {store.path}`, then "
            raise ConfigError(
                f"{model}.num_nodes x {model}.num_gpus_per_node is {ranks}, and {wrote} {model} ranks wrote the "
                f"checkpoint {tag}, which has a part for each of them; {convert}add --ds.use_universal_ckpt, or give "
                "the old number"
            )
    if asked:
        _report(f"{tag} is not universal, and these ranks need not have it so: --ds.use_universal_ckpt has no effect")
    return False


def _report(text: str) -> None:
    print(f"ckpt.load_enable: {text}", file=sys.stderr)

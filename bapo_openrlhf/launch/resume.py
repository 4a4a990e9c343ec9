"""Choose how a run starts, before anything loads: from a checkpoint, in a new folder, or in place of an earlier run."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.flags.files import ESTIMATOR
from bapo_openrlhf.flags.paths import check_written, run_folder
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.launch.settings import CODE, DATA, MODELS, RANKS, Settings, changes, is_mended, may_change
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.checkpoint_store import (
    ACTOR,
    ADAPT,
    CRITIC,
    MANIFEST,
    TAG,
    CheckpointStore,
    step_of,
    unfinished,
)
from bapo_openrlhf.record.durable import write_atomically
from bapo_openrlhf.record.owner import check_no_owner, owned
from bapo_openrlhf.record.state_file import CheckpointError, read_document, write_document

SETTINGS, SETTINGS_KIND = "settings.json", "bapo_openrlhf settings"  # of the run's last start, in ckpt.path


@dataclass(frozen=True)
class Start:
    """How a run starts."""

    # The checkpoint from which it continues an earlier run; None if it starts from the beginning.
    tag: str | None = None
    universal: bool = False  # whether the checkpoint is loaded in DeepSpeed's universal format

    @property
    def step(self) -> int:
        """The step of the checkpoint; 0 if the run starts from the beginning."""
        return step_of(self.tag) if self.tag else 0


@contextmanager
def own_folders(args: SimpleNamespace) -> Iterator[None]:
    """Own the run's folder and `ckpt.path` for the time of the block."""
    check_written(args)
    with ExitStack() as stack:
        for folder, words in _owned_folders(args):
            stack.enter_context(owned(folder, **words))
        yield


def check_free_folders(args: SimpleNamespace) -> None:
    """Check that no run that goes on now owns a folder of this one. Nothing is changed."""
    for folder, words in _owned_folders(args):
        check_no_owner(folder, **words)


def _owned_folders(args: SimpleNamespace) -> list[tuple[Path, dict[str, str]]]:
    """The folders that a run owns, each with the words of an error about it. They may be one."""
    folders = {run_folder(args): ("run.name", args.run.name), Path(args.ckpt.path): ("ckpt.path", args.ckpt.path)}
    places = {folder.resolve(): flag for folder, flag in folders.items()}
    return [
        (folder, {"field": f"{flag} is {value}", "what": "run", "instead": f"give another --{flag}"})
        for folder, (flag, value) in places.items()
    ]


def choose_start(args: SimpleNamespace) -> Start:
    """Choose how a run starts, and check that it does not write over an earlier one. Nothing is changed.

    A damaged checkpoint is named on standard error and passed over. If there is no checkpoint at all, the run starts
    from the beginning, as in OpenRLHF.

    Raises:
        ConfigError: A new run would write over an earlier one, or next to its checkpoints; or no checkpoint is whole,
            or of this kind of run and number of ranks; or the record is that of another run or cannot be read.
    """
    resumes, folder = args.ckpt.load_enable, run_folder(args)
    _check_stays(args, folder)
    start = _newest(args) if resumes else Start()
    if start.tag is not None:
        if record.holds_run(folder) and (place := _other_place(args, record.read_run(folder))):
            raise ConfigError(
                f"run.name is {args.run.name}, and {folder} has the record of another run than {args.ckpt.path}: its "
                f"ckpt.path was {place}; give the --run.name of the run that goes on, or a new one"
            )
    elif resumes and record.holds_run(folder) and not args.run.overwrite and not (folder / record.SUMMARY).exists():
        _check_nothing_saved(args)  # the run did not end, and starts again from the beginning
    else:
        _check_free(args)
        if not resumes:
            _check_no_checkpoints(args)
    return start


def take(start: Start, args: SimpleNamespace) -> None:
    """Make OpenRLHF start as chosen, and delete what a crash left unfinished, because it can never be loaded."""
    resumes = args.ckpt.load_enable
    args.ckpt.load_enable, args.ds.use_universal_ckpt = start.tag is not None, start.universal
    if not resumes:
        return
    store = _store(args)
    with _config_errors(args):
        for tag in store.remove_unfinished() if args.adapt.enabled else ():
            _report(f"{tag} was not finished: removed")
        if start.tag and args.adapt.enabled:
            store.point_to(start.tag)
    if start.tag and not args.adapt.enabled:
        for latest in _latest_files(args):
            if latest.read_bytes() != start.tag.encode():
                write_atomically(latest, start.tag.encode())
    _report(f"resuming from {start.tag}" if start.tag else "there is no checkpoint: starting from the beginning")


# ── An earlier run ──


def _check_stays(args: SimpleNamespace, folder: Path) -> None:
    """Check that a run uses nothing of its own record that its start would delete."""
    deleted = [(folder / name).resolve() for name in (record.OTHERS if args.run.overwrite else (record.CODE,))]
    flags = flags_of(args)
    for flag in (*MODELS, *CODE):
        value = flags[flag] or ()
        for name in [value] if isinstance(value, str) else value:
            place = Path(name.rpartition(":")[0] if flag == "adapt.method" else name).resolve()
            if any(place.is_relative_to(path) for path in deleted):
                raise ConfigError(
                    f"{flag} is {name}, which the start of the run would delete; copy it, or give another --run.name"
                )


def _check_free(args: SimpleNamespace) -> None:
    folder, output = run_folder(args), Path(args.ckpt.output_dir)
    if args.run.overwrite:
        return
    if record.holds_run(folder) and args.ckpt.load_enable:
        raise ConfigError(
            f"run.name is {args.run.name}, and {folder} has a run that came to its end; ckpt.path {args.ckpt.path} has "
            "no checkpoint from which it could go on: give another --run.name, or replace that run with "
            "--run.overwrite in the place of --ckpt.load_enable"
        )
    if record.holds_run(folder):
        raise ConfigError(
            f"run.name is {args.run.name}, and {folder} already has a run; give another --run.name, or replace that "
            "run with --run.overwrite, or continue from its newest checkpoint with --ckpt.load_enable"
        )
    if (output / "config.json").exists():
        raise ConfigError(
            f"ckpt.output_dir is {output}, which already has a model; give another --ckpt.output_dir, or write over "
            "that model with --run.overwrite"
        )


def _check_no_checkpoints(args: SimpleNamespace) -> None:
    path = Path(args.ckpt.path)
    # With --run.overwrite, checkpoints in the run's folder are deleted together with the earlier run.
    if args.run.overwrite and path.resolve() == (run_folder(args) / record.CHECKPOINTS).resolve():
        return
    places = (path, *(path / part for part in (ACTOR, CRITIC, ADAPT)))
    names = {entry.name.removesuffix("_hf") for place in places for entry in place.glob("*global_step*")}
    if tags := sorted(filter(TAG.fullmatch, names), key=step_of):
        raise ConfigError(
            f"ckpt.path is {path}, which has checkpoints of an earlier run (newest: {tags[-1]}); continue "
            "from there with --ckpt.load_enable, or give another --ckpt.path, or delete them"
        )


def _check_nothing_saved(args: SimpleNamespace) -> None:
    """A checkpoint is sealed after the record of its step, so a later step shows that it was whole."""
    folder = run_folder(args)
    run, steps = record.read_run(folder), max((row["step"] for row in record.read_metrics(folder)), default=0)
    flags = run.get("config", {})
    if flags.get("ckpt.disable_ds"):
        return
    every = flags.get("ckpt.save_steps", args.ckpt.save_steps)
    if place := _other_place(args, run):
        reason = f"its ckpt.path was {place}"
    elif run and not (Path(args.ckpt.path) / SETTINGS).exists():
        reason = f"it wrote {SETTINGS} to that folder, which is not there"
    elif run.get("resumed"):
        reason = "it was resumed from one"
    elif 0 < every < steps:
        reason = f"it saved one every {every} steps"
    else:
        return
    raise ConfigError(
        f"ckpt.path is {args.ckpt.path}, which has no checkpoint, but the run in {folder} made {steps} steps, and "
        f"{reason}; give the --ckpt.path of that run, or replace the run with --run.overwrite instead of "
        "--ckpt.load_enable"
    )


def _other_place(args: SimpleNamespace, run: Mapping[str, Any]) -> str | None:
    """`ckpt.path` of the run in the run's folder, if `ckpt.path` belongs to another one. Both may have been moved."""
    place = run.get("config", {}).get("ckpt.path")
    if place is None or Path(place).resolve() == Path(args.ckpt.path).resolve():
        return None
    return None if (_settings(args) or {}).get("started") == run.get("started") else place


# ── The checkpoint ──


def _newest(args: SimpleNamespace) -> Start:
    if not args.adapt.enabled:
        return Start(_openrlhfs(args), args.ds.use_universal_ckpt)
    where = f"ckpt.path is {args.ckpt.path}"
    with _config_errors(args):
        store = _store(args)
        if store.tags():
            _check_estimator(args)
        unfinished_tags = unfinished(store)
        if tag := store.newest_whole(_report, but=unfinished_tags):
            return Start(tag, _loads_universal(args, store, tag))
        if store.has_foreign():
            raise ConfigError(
                f"{where}; its checkpoints were written without batch adaptation, and have no buffers to resume with"
            )
        if damaged_tags := [tag for tag in store.tags() if tag not in unfinished_tags]:
            raise ConfigError(f"{where}; none of its checkpoints is whole: {', '.join(damaged_tags)}")
    return Start()


def _openrlhfs(args: SimpleNamespace) -> str | None:
    """The newest checkpoint that OpenRLHF has finished without batch adaptation.

    DeepSpeed writes `latest` last, so a crash may leave a newer actor than critic. Then the older one is of both.
    """
    files = _latest_files(args)
    if not all(file.exists() for file in files):
        return None
    where, tags = f"ckpt.path is {args.ckpt.path}", []
    for file in files:
        tags.append(file.read_bytes().decode("ascii", "replace").strip())
        if not TAG.fullmatch(tags[-1]):
            raise ConfigError(f"{where}; {file} names no checkpoint, but {file.read_bytes()[:40]!r}")
    tag = min(tags, key=lambda tag: (step_of(tag), tag.startswith("best")))
    for file in files:
        if not (file.parent / tag).is_dir():
            raise ConfigError(f"{where}; {file.parent / tag} is not there, although a file `latest` names it")
    return tag


def _latest_files(args: SimpleNamespace) -> list[Path]:
    return [Path(args.ckpt.path) / part / "latest" for part in _store(args).models]


def _loads_universal(args: SimpleNamespace, store: CheckpointStore, tag: str) -> bool:
    wants_universal, is_universal = args.ds.use_universal_ckpt, store.is_universal(tag)
    if wants_universal and is_universal:
        return True
    for part, wrote in store.ranks(tag).items():
        model = part.removeprefix("_")
        of_model = getattr(args, model)
        ranks = of_model.num_nodes * of_model.num_gpus_per_node
        if wrote and wrote != ranks:
            convert = "" if is_universal else f"convert it with `bapo-openrlhf universal {store.path}`, then "
            raise ConfigError(
                f"{model}.num_nodes x {model}.num_gpus_per_node is {ranks}, and {wrote} {model} ranks wrote the "
                f"checkpoint {tag}, which has a part for each of them; {convert}add --ds.use_universal_ckpt, or give "
                "the old number"
            )
    if wants_universal:
        _report(f"{tag} is not universal, and these ranks need not have it so: --ds.use_universal_ckpt has no effect")
    return False


def saved_step(args: SimpleNamespace) -> int:
    """The step of the newest checkpoint that was finished; 0 if there is none. Its files are not read."""
    if not args.adapt.enabled:
        return Start(_openrlhfs(args)).step
    store = _store(args)
    finished_tags = (tag for tag in store.tags() if (store.folder(tag) / MANIFEST).exists())
    return next((step_of(tag) for tag in finished_tags), 0)


# ── Settings ──


def compare_with_beginning(
    args: SimpleNamespace, now: Settings, start: Start, *, data: bool = True
) -> dict[str, tuple[Any, Any]]:
    """Refuse changed settings. Returns those that may change, old and new by flag, and says them on standard error.

    The training data is compared only if `data` is set, because it may be on another machine.
    """
    path, before = Path(args.ckpt.path), _settings(args)
    if before is None:
        _report(f"{path / SETTINGS} is not there, so it is not known whether the run was begun with the same settings")
        return {}
    changed_flags = {flag: pair for flag, pair in changes(before, now).items() if data or flag != DATA}
    tag = start.tag if args.adapt.enabled else None
    has_weights = tag is not None and any((path / ADAPT / tag).glob("rollout_weights_rank*"))
    # Ranks were compared with those that wrote the checkpoint, if it tells them.
    ranks = RANKS if tag is not None and all(_store(args).ranks(tag).values()) else ()
    refused_flags = {
        flag: pair
        for flag, pair in changed_flags.items()
        if not (may_change(flag) or is_mended(flag, *pair) or flag in ranks)
        or (flag == "vllm.tensor_parallel_size" and has_weights)
        or (flag == "adapt.max_staleness" and args.train.async_enable and not Flags.of(args).ahead)
    }
    _refuse(refused_flags)
    for flag, (old, new) in changed_flags.items():
        _report(f"from step {start.step + 1} on, {flag} is {new}, and was {old}")
    return changed_flags


def _refuse(changed: Mapping[str, tuple[Any, Any]]) -> None:
    if changed:
        pairs = "; ".join(f"{flag} is {new}, and was {old}" for flag, (old, new) in changed.items())
        raise ConfigError(
            f"ckpt.load_enable continues a run as it was begun, but {pairs}; give the old values, or start a new run "
            "from the model that was trained so far; docs/reliability.md lists what may change"
        )


def _check_estimator(args: SimpleNamespace) -> None:
    """Refuse another estimator before the checkpoints are looked at: with a critic, those without are not whole."""
    changed = changes({"config": (_settings(args) or {}).get("config", {})}, {"config": flags_of(args)})
    if ESTIMATOR in changed:
        _refuse({flag: changed[flag] for flag in ("algorithm", ESTIMATOR) if flag in changed})


def keep_settings(args: SimpleNamespace, settings: Settings, started: str) -> None:
    """Write the settings next to the checkpoints, which the record knows by `started`, the time of its first start."""
    ckpt = args.ckpt
    if not ckpt.disable_ds:  # a signal may ask for a checkpoint in any run
        Path(ckpt.path).mkdir(parents=True, exist_ok=True)
        write_document(Path(ckpt.path) / SETTINGS, SETTINGS_KIND, {**settings, "started": started})


def _settings(args: SimpleNamespace) -> dict[str, Any] | None:
    file = Path(args.ckpt.path) / SETTINGS
    try:
        return read_document(file, SETTINGS_KIND) if file.exists() else None
    except (CheckpointError, OSError) as error:
        where = f"ckpt.path is {args.ckpt.path}; {error}"
        raise ConfigError(f"{where}; if that file is deleted, the run goes on and nothing is compared") from None


def products_by_step(args: SimpleNamespace, way: str, start: Start) -> dict[str, str]:
    """How the run multiplies bfloat16 matrices (`cpu.products.way`), by first step. It reports a change."""
    if start.tag is None:
        return {"1": way}
    first = start.step + 1
    earlier = record.read_run(run_folder(args)).get("bf16_products") or {}  # null is of a GPU
    ways = {step: old_way for step, old_way in earlier.items() if int(step) < first}
    if not ways or list(ways.values())[-1] == way:
        return ways or {str(first): way}
    _report(
        f"the run multiplied bfloat16 matrices the way {list(ways.values())[-1]!r}, and on this CPU it goes on with "
        f"{way!r}. So its numbers are not exactly those of a run that stays on one kind of CPU"
    )
    return ways | {str(first): way}


# ── Parts ──


def _store(args: SimpleNamespace) -> CheckpointStore:
    return CheckpointStore(Path(args.ckpt.path), critic=bool(args.critic.model_name_or_path))


@contextmanager
def _config_errors(args: SimpleNamespace) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"ckpt.path is {args.ckpt.path}; {error}") from error


def _report(text: str) -> None:
    print(f"ckpt.load_enable: {text}", file=sys.stderr)

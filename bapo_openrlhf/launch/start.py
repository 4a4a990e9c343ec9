"""Start a run on the real stack, and write its summary and how it ended. Several runs may share one Ray."""

import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError, Ended, RunError, one_line, reason_of
from bapo_openrlhf.flags.checked import Checked, set_openrlhf_flags
from bapo_openrlhf.flags.config import set_flags
from bapo_openrlhf.flags.paths import make_absolute, run_folder
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.flags.sizes import run_steps
from bapo_openrlhf.launch.resume import (
    choose_start,
    compare_with_beginning,
    keep_settings,
    products_by_step,
    saved_step,
    take,
)
from bapo_openrlhf.launch.settings import settings_of
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.outcome import UNTRAINED, nothing_trained
from bapo_openrlhf.record.progress import progress_bar
from bapo_openrlhf.record.state_file import CheckpointError
from bapo_openrlhf.training.driver.signals import Signals
from bapo_openrlhf.user_file import ORIGIN, at_home

# What flags must be on a machine without a GPU.
ON_THE_CPU = {
    "vllm.enforce_eager": True,
    "vllm.sync_backend": "gloo",
    "ds.attn_implementation": "eager",
    "vllm.sync_with_ray": False,
    "vllm.enable_sleep": False,
    "ds.enable_sleep": False,  # DeepSpeed offloads only the states of an optimizer for GPUs
    "ds.packing_samples": False,
}


def logical_gpus(args: SimpleNamespace) -> int:
    """The number of devices that the run takes at most: each model has its own, also one that is not loaded."""
    models = [args.actor, args.ref, args.critic] + ([] if args.reward.remote_url else [args.reward])
    return (
        sum(m.num_nodes * m.num_gpus_per_node for m in models) + args.vllm.num_engines * args.vllm.tensor_parallel_size
    )


def launch(args: SimpleNamespace, checked: Checked, signals: Signals, command: Sequence[str]) -> Path:
    """Train to the end and write the summary. The run gets what `preflight.check_inputs` worked out as `args.checked`.

    Raises:
        ConfigError: The run cannot start. Nothing was loaded.
        RunError: The run failed.
        Ended: A signal stopped the run, it stalled, or it trained nothing.
    """
    settings, evaluated = settings_of(args, checked.prompts), args.eval.dataset  # as the user gave them
    _check_device(args)
    set_openrlhf_flags(args)
    make_absolute(args)
    start = choose_start(args)
    resumes = start.tag is not None
    changed_flags = compare_with_beginning(args, settings, start) if resumes else {}
    take(start, args)
    args.checked = replace(checked, resume_tag=start.tag, evaluated=evaluated)
    set_flags(args, checked.kept)
    folder = run_folder(args)
    clock = time.perf_counter()
    steps = run_steps(args, checked.prompts, checked.candidates) if checked.prompts else None
    label = args.algorithm or f"{args.algo.advantage.estimator}+{args.adapt.method}"
    products = machine.bf16_products()
    metadata = {
        "name": args.run.name,
        "algorithm": label,
        "seed": args.train.seed,
        "started": record.now(),
        "total_steps": steps,
        **record.provenance(secret=args.logger.wandb.key),
        "bf16_products": products_by_step(args, products, start) if products else None,
        **settings,
    }
    if resumes:
        at = {"at": metadata["started"], "step": start.step + 1}
        metadata["changed"] = [
            {**at, "flag": flag, "before": old, "now": new} for flag, (old, new) in changed_flags.items()
        ]
    try:
        if args.run.overwrite and not resumes:
            record.remove_run(folder)
        record.begin_run(folder, metadata, resumes=resumes)
        keep_settings(args, settings, record.read_run(folder)["started"])
        keep_user_files(args, folder)
    except OSError as error:
        raise ConfigError(
            f"run.name is {args.run.name}; {error.filename} cannot be written: {error.strerror}"
        ) from error
    quiet = args.run.logs == "progress"
    bar = progress_bar(folder, steps, f"{args.run.name}: {label}") if quiet else nullcontext()
    with recorded(args, folder, command):
        with bar, signals.exits():
            _train(args, signals)
        _summarise(args, folder, metadata, clock)
    return folder


def keep_user_files(args: SimpleNamespace, folder: Path) -> None:
    """Copy the user's files into the record, and let the run use the copies. OSError if one cannot be copied.

    Processes of a run load them again, for example after a reward function crashed. If the user edits one meanwhile,
    the rewards would otherwise change within a run.
    """
    place = folder / record.CODE
    shutil.rmtree(place, ignore_errors=True)  # of an earlier start
    args.reward.remote_url = [_kept(name, place) for name in args.reward.remote_url or []] or args.reward.remote_url
    if args.train.agent_func_path:
        args.train.agent_func_path = _kept(args.train.agent_func_path, place)
    file, colon, kind = args.adapt.method.rpartition(":")
    if colon:
        args.adapt.method = f"{_kept(file, place)}:{kind}"


def _kept(name: str, place: Path) -> str:
    path = at_home(name)
    if not name.endswith(".py") or not path.is_file():
        return name
    place.mkdir(exist_ok=True)
    copy = place / f"{len(list(place.iterdir())) // 2}_{path.name}"
    shutil.copyfile(path, copy)
    Path(f"{copy}{ORIGIN}").write_text(str(path.resolve()), encoding="utf-8")
    return str(copy)


@contextmanager
def recorded(args: SimpleNamespace, folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Write into run.json how the block ended. Ended then also says how the run goes on, if it does."""
    try:
        yield
    except Ended as ended:
        text = ended.text if ended.code == UNTRAINED else f"{ended.text}. {_goes_on(args, command)}"
        _note(folder, ended.how, ended.code, text)
        raise Ended(ended.how, ended.code, text) from None
    except Exception as error:
        _note(folder, "failed", 1, str(error) if isinstance(error, RunError) else one_line(error))
        raise
    _note(folder, "finished", 0, "")


def _note(folder: Path, how: str, status: int, text: str) -> None:
    with suppress(OSError, ConfigError):  # such as a full disk, which is no reason to hide why a run ended
        record.end_run(folder, how, status=status, text=text)


def _goes_on(args: SimpleNamespace, command: Sequence[str]) -> str:
    more = ["--ckpt.load_enable"] if "--ckpt.load_enable" not in command else []
    more += ["--run.overwrite=false"] if args.run.overwrite else []  # it would delete what was trained
    words = shlex.join(record.without_secret([*command, *more], args.logger.wandb.key))
    try:
        step = saved_step(args)
    except (CheckpointError, ConfigError, OSError) as error:
        return f"Which step is saved is not known ({one_line(error)}): {words}"
    if step:
        return f"It goes on with step {step + 1}: {words}"
    return f"No step is saved{' (ckpt.disable_ds)' if args.ckpt.disable_ds else ''}, so it begins again: {words}"


def _summarise(args: SimpleNamespace, folder: Path, metadata: Mapping[str, Any], clock: float) -> None:
    rows = record.read_metrics(folder)
    summary = {
        **{name: metadata[name] for name in ("algorithm", "seed", "commit", "command", "versions")},
        **record.summarise(rows),
        "nothing_trained": nothing_trained(rows, args.algo.advantage.estimator),
        "started": metadata["started"],
        "finished": record.now(),
    }
    summary["seconds"]["whole_run"] = time.perf_counter() - clock
    record.write_summary(folder, summary)
    if change := record.change_in_words(record.read_evaluations(folder)):
        print(f"held-out: {change}", file=sys.stderr)
    how = "ended" if summary["nothing_trained"] else "finished"
    print(f"{how}: the model is in {args.ckpt.output_dir}; next: bapo-openrlhf report {folder}", file=sys.stderr)
    if summary["nothing_trained"]:
        raise Ended("untrained", UNTRAINED, summary["nothing_trained"])


def _check_device(args: SimpleNamespace) -> None:
    flags, shares_gpus = Flags.of(args), args.train.colocate_all and not args.train.async_enable
    if not machine.on_cpu():
        if shares_gpus and args.vllm.sync_backend != "nccl" and not args.vllm.sync_with_ray:
            raise ConfigError(
                f"vllm.sync_backend is {args.vllm.sync_backend}; on GPUs with train.colocate_all it must be nccl, "
                "because OpenRLHF makes a group of NCCL for any other too, and NCCL takes no two processes on one GPU"
            )
        return
    if wrong := {name: allowed for name, allowed in ON_THE_CPU.items() if flags[name] != allowed}:
        values = ", ".join(f"{name} is {flags[name]}" for name in wrong)
        words = " ".join(f"--{name} {str(allowed).lower()}" for name, allowed in wrong.items())
        raise ConfigError(
            f"{values}; on a machine without a GPU a run needs {words} (`bapo-openrlhf init --cpu` writes a "
            "configuration with them)"
        )
    if (ranks := flags.gpus("actor")) > 1:
        says = f"This machine has no GPU: the {ranks} ranks of the actor are processes, which share the cores."
        print(says, file=sys.stderr)


def _last_line(error: Exception) -> str:
    """The message of a worker's error in one line, without the remote traceback that Ray puts into it."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    _, places, after = text.rpartition('File "')
    if places:  # the error's own lines follow the last place, whose line of code is indented
        lines = after.splitlines()
        own = next((number for number, line in enumerate(lines) if number and not line.startswith(" ")), -1)
        text = "\n".join(lines[own:])
    return reason_of(text) or type(cause).__name__


def _lost_nodes() -> str:
    """The nodes that Ray loses now, if there are several. It waits half a minute for a sign of life of each."""
    import ray

    live_nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    lost_nodes, deadline = [], time.monotonic() + 30
    while len(live_nodes) > 1 and not lost_nodes and time.monotonic() < deadline:
        time.sleep(1)
        lost_nodes = [node for node in ray.nodes() if node["NodeID"] in live_nodes and not node["Alive"]]
    return "".join(f" Ray has lost the node {n['NodeManagerAddress']}: {n['DeathReasonMessage']}." for n in lost_nodes)


def _train(args: SimpleNamespace, signals: Signals) -> None:
    machine.set_up()
    if machine.without_flash_attention():
        print("flash-attn is not installed, so this run packs no samples", file=sys.stderr)

    import ray

    from bapo_openrlhf.training.driver.build import train
    from bapo_openrlhf.training.driver.own_ray import connect

    own_ray = None if ray.is_initialized() else machine.own_ray(logical_gpus(args))
    if own_ray:
        connect(**own_ray)
    try:
        train(args, signals)
    except ray.exceptions.RayError as error:
        traceback.print_exc()
        raise RunError(_last_line(error) + _lost_nodes()) from error
    finally:
        if own_ray:
            time.sleep(0.5)  # the last lines of the workers' logs arrive some tenths of a second late
            ray.shutdown()


@contextmanager
def shared_ray(devices: int, runs: int) -> Iterator[dict[str, str]]:
    """Start a Ray for the time of the block. Yields the environment variables with which a run connects to it.

    If RAY_ADDRESS names a cluster that is already up, the runs go there and no Ray is started. On the CPU, Ray only
    counts the `devices` of the `runs` that train at the same time, and these share the cores. With GPUs, it counts
    those of this machine.
    """
    if os.environ.get("RAY_ADDRESS") and not machine.on_cpu():
        yield {}
        return
    with machine.processes():
        import ray

        from bapo_openrlhf.training.driver.own_ray import connect, token

        with_gpus = {"address": "local", "include_dashboard": False, "logging_level": "warning"}
        context = connect(**(machine.own_ray(devices) or with_gpus))
        try:
            address = {machine.shared_address(): context.address_info["gcs_address"]}
            yield address | token() | machine.share_of_cores(runs)
        finally:
            ray.shutdown()

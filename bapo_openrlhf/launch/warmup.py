"""Supervised training with OpenRLHF's own trainer, on GPUs or on the CPU.

A base model that solves no problem of a task has no group with mixed rewards, so it cannot learn from rewards. A short
training on worked solutions comes first: the warm-up.
"""

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import host, machine
from bapo_openrlhf.data.check import check_warmup
from bapo_openrlhf.data.prompts import check_tokenizer
from bapo_openrlhf.data.reading import Read
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.flags.paths import use_kept
from bapo_openrlhf.host import rebound, require_name
from bapo_openrlhf.launch.preflight import check_model, check_packages, unprepared
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.user_file import at_home


def check(args: SimpleNamespace, folder: Path) -> dict[str, Read]:
    """Check everything that can be known before the model loads.

    Returns:
        The data by the flags that name it. The rows are kept in the folder.

    Raises:
        ConfigError: The message names the flag, the value and what is allowed.
    """
    check_model("model.model_name_or_path", args.model.model_name_or_path)
    check_tokenizer("model.model_name_or_path", args.model.model_name_or_path)
    out, model = at_home(args.ckpt.output_dir), at_home(args.model.model_name_or_path)
    if out.is_file() or out.resolve() == model.resolve():
        raise ConfigError(f"ckpt.output_dir is {out}; it must be a folder, and another one than the model's")
    if (out / "config.json").exists() and not args.ckpt.load_enable:
        raise ConfigError(
            f"ckpt.output_dir is {out}, which already has a model; give another --ckpt.output_dir, or delete that model"
        )
    if machine.on_cpu():
        allowed = {"attn_implementation": "eager", "packing_samples": False, "load_in_4bit": False}
        for name, value in allowed.items():
            if getattr(args.ds, name) != value:
                given = getattr(args.ds, name)
                raise ConfigError(f"ds.{name} is {given}; on a machine without a GPU it must be {value}")
    check_packages(args)
    train, ranks = args.train, int(os.environ.get("WORLD_SIZE", "1"))
    samples = train.micro_batch_size * ranks
    if train.batch_size % samples:
        raise ConfigError(
            f"train.batch_size is {train.batch_size}; it must be a multiple of {samples} = ranks {ranks} x "
            f"train.micro_batch_size {train.micro_batch_size}"
        )
    if text := unprepared("data.dataset", args.data.dataset):
        raise ConfigError(text)
    data = check_warmup(args, folder)
    rows = data["data.dataset"].rows
    if rows is not None and rows * train.max_epochs < train.batch_size:
        raise ConfigError(
            f"train.batch_size is {train.batch_size}; it must be at most {rows * train.max_epochs} = rows {rows} x "
            f"train.max_epochs {train.max_epochs}"
        )
    return data


def launch(args: SimpleNamespace, data: Mapping[str, Read], words: Sequence[str]) -> None:
    """Train: here on the CPU, and in a process for each GPU of this machine if it has any.

    Args:
        args: What OpenRLHF's script takes.
        data: What `check` has read.
        words: The command line, which the processes get.

    Raises:
        RunError: The training failed.
    """
    if "LOCAL_RANK" in os.environ:  # a process that another one has started, which owns the folders
        _launch(args, data, words)
        return
    with ExitStack() as stack:
        for flag in ("output_dir", *(["path"] if args.ckpt.save_steps > 0 or args.ckpt.load_enable else [])):
            folder = at_home(getattr(args.ckpt, flag))
            field, instead = f"ckpt.{flag} is {folder}", f"give another --ckpt.{flag}"
            stack.enter_context(owned(folder, field=field, what="warm-up", instead=instead))
        _launch(args, data, words)


def _launch(args: SimpleNamespace, data: Mapping[str, Read], words: Sequence[str]) -> None:
    if not machine.on_cpu() and "LOCAL_RANK" not in os.environ:
        runner = ["-m", "deepspeed.launcher.runner", "--no_local_rank", "--module", "bapo_openrlhf.cli", "warmup"]
        if subprocess.run([sys.executable, *runner, *words]).returncode != 0:
            raise RunError("the warm-up failed; the messages of its processes stand above")
        return
    _set_up()
    first = os.environ["RANK"] == "0"
    if first:
        _warn_of_long_rows(args, data["data.dataset"])
    trained_on = args.data.dataset
    use_kept(args, {flag: read.names for flag, read in data.items()})
    _train(args)
    if first:
        print(f"{args.ckpt.output_dir}: {args.model.model_name_or_path}, trained on {trained_on}")


def _train(args: SimpleNamespace) -> None:
    """Run OpenRLHF's script, and repair what ZeRO stage 3 rounded (see `rotary`) when everything is loaded."""
    from bapo_openrlhf.training.worker.rotary import restore_frequencies
    from bapo_openrlhf.training.worker.savable import make_savable
    from bapo_openrlhf.training.worker.strategy import strategy_of

    script = importlib.import_module(f"openrlhf.cli.{host.SFT}")

    class RestoringTrainer(require_name(script, "SFTTrainer")):  # type: ignore[misc]
        """OpenRLHF's trainer, which repairs its model first."""

        def __init__(self, model: Any, **others: Any) -> None:
            make_savable(model)
            restore_frequencies(model)
            super().__init__(model=model, **others)

    with rebound(script, SFTTrainer=RestoringTrainer, get_strategy=strategy_of):
        script.train(args)


def _set_up() -> None:
    """Patch this process as far as the machine needs it. On the CPU also set what DeepSpeed's launcher would set."""
    machine.set_up()
    if not machine.on_cpu():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        only = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {**only, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)


def _warn_of_long_rows(args: SimpleNamespace, read: Read) -> None:
    """Say how many rows do not fit with their end. OpenRLHF cuts them, or leaves them out if the prompt is too long."""
    from openrlhf.datasets.sft_dataset import preprocess_data
    from transformers import AutoTokenizer

    data = args.data
    if data.multiturn or args.model.pretrain_mode_enable:
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model.model_name_or_path, trust_remote_code=True)
    template = tokenizer.apply_chat_template if data.apply_chat_template else None
    texts = (
        "".join(preprocess_data(row, data.input_template, data.input_key, data.output_key, template))
        for part in read.parts
        for _, row in part.places()
    )
    end = tokenizer.eos_token or ""
    whole = (text if text.endswith(end) else f"{text} {end}" for text in (text.rstrip("\n") for text in texts))
    long = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) > data.max_len for text in whole)
    if long:
        what = f"rows with more tokens, which are cut, or left out if the prompt is too long: {long}"
        print(f"warning: data.max_len is {data.max_len}; {what}", file=sys.stderr)

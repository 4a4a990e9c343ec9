"""Find bad input before any model loads: data, models, reward function and batch arithmetic."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import user_file
from bapo_openrlhf.adapt.arithmetic import BatchArithmetic, batch_arithmetic
from bapo_openrlhf.config import Checked
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch import attention, vision
from bapo_openrlhf.launch.openrlhf_flags import behaviour_kl, check_combinations
from bapo_openrlhf.tasks import TASKS
from bapo_openrlhf.training.data_files import local_rows, read_traces

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_inputs(args: SimpleNamespace, *, call_reward: bool = True, data: bool = True) -> Checked:
    """Make all checks of this module.

    Args:
        args: Parsed arguments.
        data: Whether to read the data sets. They cannot be read before they are prepared.
        call_reward: Whether to call the reward function once on the first row.

    Returns:
        What the checks worked out; the checkpoint is chosen later.

    Raises:
        ConfigError: The message names the flag, the value and what is allowed.
    """
    check_combinations(args)
    attention.check_packages(args)
    arithmetic = check_batch(args)
    method = args.adapt.make_method(arithmetic, args.train.seed) if args.adapt.enabled else None
    check_model("actor.model_name_or_path", args.actor.model_name_or_path)
    vision.check_model("actor.model_name_or_path", args.actor.model_name_or_path, args)
    if args.critic.model_name_or_path:
        check_model("critic.model_name_or_path", args.critic.model_name_or_path)
    row, prompts = check_dataset("data.prompt_dataset", args.data.prompt_dataset, args) if data else (None, None)
    if args.eval.dataset and data:
        check_dataset("eval.dataset", args.eval.dataset, args)
    if method is not None and method.traces is not None:
        read_traces(method.traces, args if prompts is not None else None)
    check_reward(args, row if call_reward else None)
    check_checkpoints(args)
    return Checked(
        arithmetic=arithmetic,
        prompts=None if prompts is None else min(prompts, args.data.max_samples),
        candidates=1 if method is None else method.candidates,
        kl_coef=behaviour_kl(args),
    )


def check_batch(args: SimpleNamespace) -> BatchArithmetic:
    """Check that group size, batch sizes and ranks fit together."""
    if (args.vllm.num_engines or 0) < 1:
        raise ConfigError(f"vllm.num_engines is {args.vllm.num_engines}; it must be at least 1")
    arithmetic = batch_arithmetic(args)
    for model in ("actor", "critic"):
        step = arithmetic.ranks.get(model, 0) * arithmetic.micro_train
        if step and arithmetic.train_batch % step:
            raise ConfigError(
                f"train.batch_size is {arithmetic.train_batch}; it must be a multiple of {step} = {model} ranks "
                f"{arithmetic.ranks[model]} x train.micro_batch_size {arithmetic.micro_train}"
            )
    if args.adapt.enabled and arithmetic.group_size < 2:
        raise ConfigError(
            f"rollout.n_samples_per_prompt is {arithmetic.group_size}; batch adaptation needs groups of at least 2"
        )
    return arithmetic


def check_model(flag: str, name: str | None) -> None:
    """Check that a model is a folder with a config.json, or may be a name on the model hub."""
    if not name:
        raise ConfigError(f"{flag} is not set; it must be a model folder or a model hub name")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{flag} is {name}; the folder has no config.json, so it is not a model")
        return
    looks_local = not _HUB_NAME.fullmatch(name) or name.startswith(".") or ("/" in name and path.parent.is_dir())
    if path.exists() or looks_local:
        raise ConfigError(f"{flag} is {name}; there is no such model folder")


def check_dataset(flag: str, datasets: str | None, args: SimpleNamespace) -> tuple[dict[str, Any] | None, int | None]:
    """Check that local files exist and have rows, and that each row has the requested columns and images that open.

    Returns:
        The first row and the number of rows; None and None if the data is not local.
    """
    if not datasets:
        raise ConfigError(f"{flag} is not set; it must be a file, a folder or a data set's hub name")
    columns = {"data.input_key": args.data.input_key, "data.label_key": args.data.label_key}
    first, total, local = None, 0, True
    for dataset in datasets.split(","):
        path = Path(dataset.strip().split("@")[0]).expanduser()
        if path.suffix not in (".json", ".jsonl", ".parquet", ".csv"):
            local = False  # a folder or a name on the hub, which OpenRLHF loads
            continue
        if not path.is_file():
            prepared = re.fullmatch(rf"data/({'|'.join(TASKS)})/\w+\.jsonl", dataset.strip())
            hint = f"; `bapo-openrlhf prepare {prepared[1]}` makes it" if prepared else ""
            raise ConfigError(f"{flag} is {dataset}; there is no such file{hint}")
        count = 0
        for row in local_rows(flag, path):
            for key_flag, column in columns.items():
                if column and column not in row:
                    raise ConfigError(
                        f"{flag} {path}, row {count + 1}: no column {column!r} ({key_flag}); it has {', '.join(row)}"
                    )
            vision.check_row(f"{flag} {path}, row {count + 1}", row, args)
            first = first or row
            count += 1
        if count == 0:
            raise ConfigError(f"{flag} {path} has no rows; it must have at least one")
        total += count
    return (first, total) if local else (None, None)


def check_checkpoints(args: SimpleNamespace) -> None:
    """Check that there is an older checkpoint to use if a crash interrupts the writing of a new one."""
    ckpt = args.ckpt
    if args.adapt.enabled and ckpt.save_steps > 0 and not ckpt.disable_ds and ckpt.max_num < 2:
        raise ConfigError(
            f"ckpt.max_num is {ckpt.max_num}; it must be at least 2: OpenRLHF deletes the oldest checkpoint before it "
            "writes a new one"
        )


def check_reward(args: SimpleNamespace, row: dict[str, Any] | None) -> None:
    """Check that the reward function exists. If a row is given, it must return one finite reward for one response."""
    endpoints = args.reward.remote_url
    if not endpoints or endpoints == "agent" or not endpoints[0].endswith(".py"):
        return
    path = Path(endpoints[0]).expanduser()
    module = user_file.load("reward.remote_url", path)
    function = getattr(module, "reward_func", None)
    if not callable(function):
        raise ConfigError(f"reward.remote_url {path} defines no function reward_func(queries, prompts, labels)")
    if row is None:
        return
    prompt = row[args.data.input_key]
    prompt = prompt if isinstance(prompt, str) else json.dumps(prompt)
    label = row.get(args.data.label_key) if args.data.label_key else ""
    try:
        result = function([prompt], [prompt], [label])
    except Exception as error:
        raise ConfigError(
            f"reward.remote_url {path}: reward_func raised {type(error).__name__}: {error}, "
            "called with an empty response to the first prompt"
        ) from error
    if not isinstance(result, dict) or "rewards" not in result:
        raise ConfigError(
            f"reward.remote_url {path}: reward_func must return a dict with 'rewards', returned {result!r}"
        )
    rewards = result["rewards"]
    rewards = rewards.flatten().tolist() if hasattr(rewards, "flatten") else rewards
    rewards = rewards if isinstance(rewards, (list, tuple)) else [rewards]
    if len(rewards) != 1:
        raise ConfigError(f"reward.remote_url {path}: reward_func returned {len(rewards)} rewards for one response")
    try:
        finite = math.isfinite(float(rewards[0]))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        raise ConfigError(
            f"reward.remote_url {path}: reward_func returned {rewards[0]!r}; rewards must be finite numbers"
        )

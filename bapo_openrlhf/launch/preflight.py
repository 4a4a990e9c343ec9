"""Find bad input before any model loads: flags, data, models and the reward function."""

import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import machine, user_file
from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.data import vision
from bapo_openrlhf.data.check import Data, check_data
from bapo_openrlhf.data.prompts import check_tokenizer, local_tokenizer
from bapo_openrlhf.data.sources import looks_local
from bapo_openrlhf.errors import ConfigError, not_checked, one_line
from bapo_openrlhf.flags.cautions import CAUTIONS
from bapo_openrlhf.flags.checked import Checked
from bapo_openrlhf.flags.conflicts import COMBINATIONS
from bapo_openrlhf.flags.paths import check_read, check_written
from bapo_openrlhf.flags.rule import Flags, check_rules, messages
from bapo_openrlhf.flags.sizes import actor_steps, batch_arithmetic, critic_steps, run_steps
from bapo_openrlhf.launch.apart import Begins, Questions, Trial
from bapo_openrlhf.launch.environment import (
    check_allocator,
    check_environment,
    missing_attention,
    warnings_of_machine,
)
from bapo_openrlhf.launch.model_files import check_same_tokens, config_of, weight_files
from bapo_openrlhf.launch.model_trial import (
    check_generation,
    check_loading,
    check_schedule,
    check_sync,
    warn_of_dropout,
)
from bapo_openrlhf.launch.rewards import check_reward
from bapo_openrlhf.methods.registry import METHODS
from bapo_openrlhf.tasks import TASKS, task_of_file

ACTOR, REWARD = "actor.model_name_or_path", "reward.model_name_or_path"
SECONDS = 20  # to wait for the model hub
KEPT = ".data"  # the folder in `run.dir` with the rows that its runs read


def check_inputs(
    args: SimpleNamespace,
    *,
    data: bool = True,
    weights: bool = True,
    ahead: bool = False,
    keep: bool = True,
    elsewhere: int | None = None,
) -> Checked:
    """Check everything that a run reads, as far as that needs no loaded model. The checkpoint is chosen later.

    Args:
        data: Whether to read the data sets. They cannot be read before they are prepared.
        weights: Whether models must have their weights. Without them a model's config.json and tokenizer are enough.
        elsewhere: Rows of the training data, if it is on another machine.
        ahead: See `check_data`.
        keep: Whether the rows stay in `run.dir`, for the run. Those of a run that is yet to come never do.
    """
    check_environment()
    warnings = warnings_of_machine()
    check_written(args)
    check_read(args)
    flags = Flags.of(args)
    check_rules(COMBINATIONS, flags)
    warnings += _check_machine(args)
    arithmetic = batch_arithmetic(args)
    flags.method = args.adapt.make_method(arithmetic, args.train.seed) if args.adapt.enabled else None
    check_rules(COMBINATIONS, flags)
    with Questions() as questions:
        warnings += _check_models(args, questions, weights=weights, ahead=ahead)
        data_check = _check_data(args, ahead=ahead, keep=keep and not ahead) if data else Data(None, None, [])
        warnings += data_check.warnings
        flags.prompts = prompts = elsewhere if data_check.prompts is None else data_check.prompts
        candidates = 1 if flags.method is None else flags.method.candidates
        check_rules(COMBINATIONS, flags)
        if args.adapt.enabled and args.adapt.method not in METHODS:
            check_method(args, arithmetic, data_check.problem)
        warnings += check_reward(args, data_check.problem, data_check.not_found)
        flags.steps = None if prompts is None else run_steps(args, prompts, candidates)
        if weights and prompts is not None:
            _ask_schedules(args, questions, actor_steps(args, prompts, candidates))
        warnings += questions.answers()
    return Checked(
        prompts=prompts,
        candidates=candidates,
        kept=data_check.kept,
        warnings=(*messages(CAUTIONS, flags), *warnings),
    )


def _check_machine(args: SimpleNamespace) -> list[str]:
    """Returns a warning if torch, which knows whether there is a GPU, is not installed and would have to be asked."""
    try:
        check_allocator(args)
        check_packages(args)
    except ModuleNotFoundError as error:
        return [not_checked("the GPUs of this machine", error)]
    return []


def _check_data(args: SimpleNamespace, *, ahead: bool, keep: bool) -> Data:
    """`check_data`, which is told what only a task knows: files that are to be made, and what is a label."""
    names = {"eval.dataset": args.eval.dataset, "data.prompt_dataset": args.data.prompt_dataset}
    missing = {flag: text for flag, value in names.items() if (text := unprepared(flag, value))}
    if missing and not ahead:
        raise ConfigError(next(iter(missing.values())))
    urls = args.reward.remote_url or [""]
    task = task_of_file(urls[0]) if len(urls) == 1 and urls[0].endswith(".py") else None
    with nullcontext(Path(args.run.dir).resolve() / KEPT) if keep else TemporaryDirectory() as folder:
        data = check_data(args, Path(folder), ahead=ahead, without=missing, takes=task and task.takes)
    return replace(data, warnings=[*missing.values(), *data.warnings])


def unprepared(flag: str, names: str | None) -> str:
    """A sentence of a file of data that is not there, and that the preparation of a task makes; "" without one."""
    for file in map(str.strip, (names or "").split(",")):
        task = re.fullmatch(rf"data/({'|'.join(TASKS)})/\w+\.jsonl", file)
        if task and not user_file.is_file(flag, Path(file)):
            return f"{flag} is {file}; there is no such file yet; `bapo-openrlhf prepare {task[1]}` makes it"
    return ""


def print_warnings(inputs: Checked, where: str = "") -> None:
    """Print each warning on a line of standard error, with `where` before it."""
    for text in inputs.warnings:
        print(f"warning: {where}{text}", file=sys.stderr)


def check_method(args: SimpleNamespace, arithmetic: BatchArithmetic, problem: tuple[str, Any] | None) -> None:
    """Try a method of the user's for a few steps, with groups of the first prompt of the data if there is one."""
    from bapo_openrlhf.launch.method_trial import try_method  # it reads the catalogue of metrics

    def call(begins: Begins) -> list[str]:
        begins("")
        try_method(
            lambda: args.adapt.make_method(arithmetic, args.train.seed),
            capacity=arithmetic.capacity,
            group_size=arithmetic.group_size,
            prompts=arithmetic.rollout_groups,
            prompt=None if problem is None else Prompt(*problem),
            reward_range=args.adapt.rewards() or UNIT,
        )
        return []

    Trial("adapt.method", args.adapt.method, "the method", "tried with made-up groups").run(call)


def check_packages(args: SimpleNamespace) -> None:
    """Refuse wandb if it is not installed, and such attention, if this is the machine with the GPUs."""
    # A folder of wandb's runs would be found, too, and has no origin.
    if args.logger.wandb.key and getattr(find_spec("wandb"), "origin", None) is None:
        raise ConfigError(
            "logger.wandb.key is set; it needs the package wandb, which is not installed here: pip install wandb"
        )
    problem = missing_attention(args)
    if problem and not machine.on_cpu():
        raise ConfigError(problem)


def check_model(flag: str, name: str | None, *, weights: bool = True) -> None:
    """Check that a model is a folder with a config.json and whole weights, or may be a name on the model hub."""
    if not name:
        raise ConfigError(f"{flag} is not set; it must be a model folder or a model hub name")
    path = user_file.at_home(name)
    if user_file.is_dir(flag, path):
        if not user_file.is_file(flag, path / "config.json"):
            raise ConfigError(f"{flag} is {name}; the folder has no config.json, so it is not a model")
        if weights:
            weight_files(f"{flag} is {path}", path)
    elif path.exists() or looks_local(name):
        raise ConfigError(f"{flag} is {name}; there is no such model folder{user_file.start_of(path)}{_nearest(path)}")
    elif _has_folders(path.parent) and local_tokenizer(name) is None:
        raise ConfigError(
            f"{flag} is {name}; there is no such model folder{user_file.start_of(path)}, and it is taken for no name "
            f"on the model hub, because {path.parent} is a folder there{_nearest(path)}"
        )


def _has_folders(parent: Path) -> bool:
    return parent != Path() and parent.is_dir() and any(path.is_dir() for path in parent.iterdir())


def _nearest(path: Path) -> str:
    names = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
    matches = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / matches[0]}?" if matches else ""


def check_hub_models(args: SimpleNamespace) -> None:
    """Ask the cache, then the hub, for each model that is no folder. `check` does not, because it needs no network."""
    for model in Flags.of(args).loaded:
        if model == "ref":  # it is the actor
            continue
        flag = f"{model}.model_name_or_path"
        for name in (getattr(args, model).model_name_or_path or "").split(","):
            if not Path(name).is_dir() and not args.use_ms:
                _check_hub(flag, name)


def _check_hub(flag: str, name: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=SECONDS)
    except Exception as error:  # of the hub's library, or of its connection
        raise ConfigError(
            f"{flag} is {name}; it is not a folder{user_file.start_of(Path(name))}, it was not downloaded before, and "
            f"the model hub does not give it: {one_line(error)}"
        ) from None


def _check_models(args: SimpleNamespace, questions: Questions, *, weights: bool, ahead: bool) -> list[str]:
    """Returns a warning for each model that is not on this machine, if nothing is downloaded (`ahead`)."""
    models = {
        "actor": args.actor.model_name_or_path,
        "critic": args.critic.model_name_or_path,
        "reward": None if args.reward.remote_url else args.reward.model_name_or_path,
    }
    names = {f"{role}.model_name_or_path": name for role, name in models.items() if role == "actor" or name}
    for flag, name in names.items():
        check_model(flag, name, weights=weights)
    check_tokenizer(ACTOR, names[ACTOR])
    folders = {flag: folder for flag, name in names.items() if (folder := user_file.at_home(name)).is_dir()}
    for flag, folder in folders.items():
        config = config_of(f"{flag} is {names[flag]}", folder)
        if flag == ACTOR:
            vision.check_model(f"{flag} is {names[flag]}", folder, config, args)
            _check_shape(f"{flag} {names[flag]}", config.get("text_config") or config, args)
        else:
            check_same_tokens(args, flag, names[flag], config)
        if args.actor.aux_loss_coef and flag != REWARD and "output_router_logits" not in config:
            raise ConfigError(
                f"actor.aux_loss_coef is {args.actor.aux_loss_coef}, and {flag} is {names[flag]}; it must be 0 then, "
                "because the model is no mixture of experts with a loss of its router (no output_router_logits in "
                "config.json)"
            )
        if not args.adapt.enabled and (flag == ACTOR or names[flag] != names[ACTOR]) and flag != REWARD:
            questions.ask(f"{flag} is {folder}", warn_of_dropout, str(folder))
    if weights:
        _ask_models(args, questions, folders)
    flags_by_name = {name: flag for flag, name in reversed(names.items()) if ahead and flag not in folders}
    return [
        f"{flag} is {name}; it is not a folder of this machine and nothing is downloaded here, so the model was not "
        "looked at"
        for name, flag in flags_by_name.items()
    ]


def _ask_models(args: SimpleNamespace, questions: Questions, folders: Mapping[str, Path]) -> None:
    lora, head = args.ds.lora, args.ds.value_head_prefix
    targets = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules or ())
    for flag, folder in folders.items():
        matrices = targets if lora.rank and flag != REWARD else None
        role = flag.partition(".")[0]
        questions.ask(f"{flag} is {folder}", check_loading, str(folder), role, head, matrices)
    if ACTOR in folders:
        folder = str(folders[ACTOR])
        for check in (check_generation, check_sync):
            questions.ask(f"{ACTOR} is {folder}", check, folder, args.data.max_len)


def _ask_schedules(args: SimpleNamespace, questions: Questions, steps: int) -> None:
    most = {"actor": steps}
    if "critic" in Flags.of(args).loaded:
        most["critic"] = critic_steps(args, steps)
    for name, count in most.items():
        model = getattr(args, name)
        rate = getattr(model, model.optim).lr
        shape = model.lr_scheduler, rate, model.lr_warmup_ratio, model.min_lr_ratio
        questions.ask(f"{name}.lr_scheduler is {model.lr_scheduler}", check_schedule, name, *shape, count)


def _check_shape(model: str, shape: dict[str, Any], args: SimpleNamespace) -> None:
    heads, part = shape.get("num_attention_heads"), args.vllm.tensor_parallel_size
    if heads and heads % part:
        raise ConfigError(
            f"vllm.tensor_parallel_size is {part}; it must divide {heads}, the attention heads of {model}"
        )
    few, many = sorted((shape.get("num_key_value_heads") or 1, part))
    if many % few:
        raise ConfigError(
            f"vllm.tensor_parallel_size is {part}; it must divide "
            f"{shape['num_key_value_heads']}, the key-value heads of {model}, or be a multiple of them"
        )

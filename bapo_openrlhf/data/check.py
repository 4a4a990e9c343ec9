"""Check the data of a run: read it as the run does, and look at every row."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.data import sources
from bapo_openrlhf.data.prompts import Renderer, local_tokenizer
from bapo_openrlhf.data.reading import Read, read
from bapo_openrlhf.data.rows import RowCheck, Seen
from bapo_openrlhf.data.sources import SOURCE
from bapo_openrlhf.data.tokenizer import Tokenizer, has_vision
from bapo_openrlhf.errors import ConfigError, not_checked
from bapo_openrlhf.host import module_of

MODEL = "actor.model_name_or_path"  # whose tokenizer makes the prompts


@dataclass(frozen=True)
class Data:
    """What is known of a run's training data.

    Attributes:
        prompts: Number of prompts that a run takes from it; None if a part of it was not read.
        problem: As in `rows.RowCheck`.
        warnings, not_found: Those of its `findings` and of its `not_found`, also for the data of evaluations.
        kept: The folders in which the rows were kept, as the value of each flag that names data.
    """

    prompts: int | None
    problem: tuple[str, Any] | None
    warnings: list[str]
    not_found: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def check_data(
    args: SimpleNamespace, folder: Path, *, ahead: bool, without: Collection[str], takes: Callable[[Any], bool] | None
) -> Data:
    """Read and check the data that a run trains on, and the data on which it is evaluated meanwhile.

    The rows are kept in `folder`. With `ahead` the run is yet to come, perhaps on another machine, so nothing is
    downloaded. The data of the flags in `without` is not read. `takes` says whether the reward function finds an answer
    right that is made of a label.

    Raises:
        ConfigError: The data cannot be read, or rows are not as a run needs them.
    """
    if not ahead:
        machine.prepare()  # before `datasets` loads the hub's library, which reads it only once
    renderer, data = cache(lambda: _renderer(args, ahead=ahead)), Data(None, None, [])
    warnings, not_found, kept = data.warnings, data.not_found, data.kept
    evaluation = [sources.of_evaluation(args)] if args.eval.dataset else []
    evaluated: Seen = {}
    for flags in (*evaluation, sources.of_training(args)):
        if flags.flag in without:
            continue
        reading = read(flags, folder, download=not ahead)
        kept[flags.flag] = reading.names
        warnings += [
            f"{flags.flag} is {source.name}; it is not on this machine and nothing is downloaded here, so no row of it "
            "was looked at"
            for source in reading.elsewhere
        ]
        try:
            render = renderer() if reading.parts else None
        except ModuleNotFoundError as error:
            render = None
            warnings.append(not_checked(f"the prompts of {flags.flag}", error))
        rows = RowCheck(flags, args, render, takes)
        rows.look(reading)
        warnings += rows.findings.warnings
        not_found += rows.not_found.warnings
        if flags.flag == "data.prompt_dataset":
            warnings += _in_both(evaluated, rows.seen)
            data = replace(data, prompts=reading.rows, problem=rows.problem)
            continue
        evaluated = rows.seen
        if not reading.elsewhere:
            _check_best(args, reading)
        if (reading.rows or 0) > args.data.max_samples:
            warnings.append(
                f"data.max_samples is {args.data.max_samples}, which OpenRLHF also takes as the limit of the "
                f"evaluation: only the first {args.data.max_samples} of the {reading.rows} rows of eval.dataset are "
                "evaluated"
            )
    return data


def _in_both(evaluation: Seen, training: Seen) -> list[str]:
    prompts = [prompt for prompt in evaluation if prompt in training]
    return [
        f"{evaluation[prompt][0]}: the prompt is that of {training[prompt][0]}; so it is with {len(prompts)} of "
        f"{len(evaluation)} prompts of eval.dataset, and their accuracy does not say what the model does with other "
        "problems"
        for prompt in prompts[:1]
    ]


def _check_best(args: SimpleNamespace, data: Read) -> None:
    """Check that `ckpt.best_metric_key` is a number of the evaluation. OpenRLHF saves no best checkpoint otherwise."""
    key, most = args.ckpt.best_metric_key, args.eval.n_samples_per_prompt
    if key in (None, "", "none"):
        return
    columns = [part.rows for part in data.parts if SOURCE in part.names]
    data_sources = {source for rows in columns for source in rows[SOURCE]} or {"default"}
    if 0 < len(columns) < len(data.parts):
        data_sources.add(None)  # of the rows of the other data sets
    of_source = dict.fromkeys(("pass1", f"pass{most}", "response_length_mean", "truncated_rate"))
    names = [f"eval_{source}_{name}" for source in sorted(map(str, data_sources)) for name in of_source]
    names += ["eval_response_length_mean", "eval_truncated_rate", "eval_num_samples"]
    if key not in names:
        raise ConfigError(
            f"ckpt.best_metric_key is {key}; it must be none, or empty for the first pass1, or a number of the "
            f"evaluation: {', '.join(names)}"
        )


def _renderer(args: SimpleNamespace, *, ahead: bool) -> Renderer:
    """What makes the run's prompts, or a ModuleNotFoundError. `ahead`: as far as the tokenizer is on this machine."""
    data, name = args.data, args.actor.model_name_or_path
    folder = local_tokenizer(name) if ahead or Path(name).is_dir() else name
    if data.input_template or (folder is not None and (data.apply_chat_template or has_vision(folder))):
        module_of("datasets/prompts_dataset.py")  # it needs torch, as processors of images do
    fast = not data.disable_fast_tokenizer
    form = {"template": data.input_template, "chat": data.apply_chat_template}
    renderer = Renderer(MODEL, folder, **form, fast=fast)
    if renderer.tokenizer is not None:
        _check_special(f"{MODEL} is {name}", renderer.tokenizer, data.solution_key)
    return renderer


def _check_special(model: str, tokenizer: Tokenizer, solutions: str | None) -> None:
    special = tokenizer.special()
    if solutions and "eos_token" not in special:
        raise ConfigError(
            f"data.solution_key is {solutions}, and {model}, whose tokenizer has no end token (eos_token); worked "
            "solutions need one, because each ends with it"
        )
    if not tokenizer.ends():
        raise ConfigError(
            f"{model}; it has no end token: neither its tokenizer (eos_token) nor its generation_config.json or "
            "config.json (eos_token_id) names one, so that each response would be cut at its longest"
        )
    for kind, problem in zip(special, tokenizer.beyond(list(special.values())), strict=True):
        if problem:
            raise ConfigError(f"{model}; the {kind} of its tokenizer {problem}")

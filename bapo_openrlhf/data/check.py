"""Check the data of a run: read it as the run does, and look at every row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.data import sources
from bapo_openrlhf.data.findings import Findings
from bapo_openrlhf.data.prompts import Renderer, local_tokenizer
from bapo_openrlhf.data.reading import Read, read
from bapo_openrlhf.data.rows import RowCheck
from bapo_openrlhf.data.sources import Request
from bapo_openrlhf.data.tokenizer import Tokenizer
from bapo_openrlhf.data.worked import wrong_example
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.user_file import is_file

MODEL = "actor.model_name_or_path"  # whose tokenizer makes the prompts

SOURCE = "datasource"  # the column by which OpenRLHF names the numbers of an evaluation


@dataclass(frozen=True)
class Data:
    """What is known of a run's training data.

    Attributes:
        prompts: Number of prompts that a run takes from it; None if a part of it was not read.
        problem: Prompt and label of its first row as a run gets them; None if none was read.
        warnings: What is seldom meant, a sentence each; also of the data that the run is evaluated on.
        not_found: What is to be said of rows if responses can only be found by their prompts.
    """

    prompts: int | None
    problem: tuple[str, Any] | None
    warnings: list[str]
    not_found: list[str] = field(default_factory=list)


def check_data(args: SimpleNamespace, *, ahead: bool = False) -> Data:
    """Check the data that a run trains on, and the data on which it is evaluated meanwhile.

    Args:
        args: The run's arguments.
        ahead: Whether the run is yet to come, perhaps on another machine. Nothing is downloaded then, and files that
            `bapo-openrlhf prepare` makes may be missing.

    Raises:
        ConfigError: The data cannot be read, or rows are not as a run needs them.
    """
    if not ahead:
        machine.prepare()  # before `datasets` loads the hub's library, which reads it only once
    renderer, warnings, not_found = cache(lambda: _renderer(args, ahead=ahead)), [], []
    data = Data(None, None, warnings, not_found)
    evaluation = [sources.of_evaluation(args)] if args.eval.dataset else []
    evaluated: Mapping[str, str] = {}
    for request in (*evaluation, sources.of_training(args)):
        missing = _unprepared(request) if ahead else []
        warnings += missing
        if missing:
            continue
        what = read(request, download=not ahead)
        warnings += [_elsewhere(request.flag, source.name) for source in what.elsewhere]
        looked = RowCheck(request, args, renderer() if what.parts else None).look(what)
        warnings += looked.warnings
        not_found += looked.not_found
        if request.flag == "eval.dataset" and not what.elsewhere:
            _check_best(args, what)
        if request.flag == "eval.dataset":
            evaluated = looked.places
        if request.flag == "data.prompt_dataset":
            warnings += _in_both(evaluated, looked.places)
            data = Data(what.rows, looked.problem, warnings, not_found)
        elif (what.rows or 0) > args.data.max_samples:
            warnings.append(
                f"data.max_samples is {args.data.max_samples}, which OpenRLHF also takes as the limit of the "
                f"evaluation: only the first {args.data.max_samples} of the {what.rows} rows of eval.dataset are "
                "evaluated"
            )
    return data


def _in_both(evaluated: Mapping[str, str], trained: Mapping[str, str]) -> list[str]:
    """A warning of prompts that a run is evaluated on and trains on, by the places of both."""
    both = [prompt for prompt in evaluated if prompt in trained]
    return [
        f"{evaluated[prompt]}: the prompt is that of {trained[prompt]}; so it is with {len(both)} of {len(evaluated)} "
        "prompts of eval.dataset, and their accuracy does not say what the model does with other problems"
        for prompt in both[:1]
    ]


def _check_best(args: SimpleNamespace, what: Read) -> None:
    """Check that `ckpt.best_metric_key` is a number of the evaluation. OpenRLHF saves no best checkpoint otherwise."""
    key, most = args.ckpt.best_metric_key, args.eval.n_samples_per_prompt
    if key in (None, "", "none"):
        return
    named = [part.rows for part in what.parts if SOURCE in part.rows.column_names]
    found = {source for rows in named for source in rows.unique(SOURCE)} or {"default"}
    if 0 < len(named) < len(what.parts):
        found.add(None)  # of the rows of the other data sets
    of_source = dict.fromkeys(("pass1", f"pass{most}", "response_length_mean", "truncated_rate"))
    names = [f"eval_{source}_{name}" for source in sorted(map(str, found)) for name in of_source]
    names += ["eval_response_length_mean", "eval_truncated_rate", "eval_num_samples"]
    if key not in names:
        raise ConfigError(
            f"ckpt.best_metric_key is {key}; it must be none, or empty for the first pass1, or a number of the "
            f"evaluation: {', '.join(names)}"
        )


def check_warmup(args: SimpleNamespace) -> Read:
    """Check the data of supervised training.

    Raises:
        ConfigError: The data cannot be read, or a row has no prompt or response.
    """
    request = sources.of_warmup(args)
    rows = read(request, download=True)
    RowCheck(request, args, None).look(rows)
    data = args.data
    if data.apply_chat_template and not data.multiturn and not data.tokenizer_chat_template:
        _check_examples(args, request, rows)
    return rows


def _check_examples(args: SimpleNamespace, request: Request, rows: Read) -> None:
    """Check what the chat template makes of the prompts and responses of supervised training."""
    model = args.model.model_name_or_path
    renderer = Renderer("model.model_name_or_path", model, template=None, chat=True)
    assert renderer.tokenizer is not None
    apply, end = renderer.tokenizer.apply_chat_template, renderer.tokenizer.special().get("eos_token", "")
    findings, columns = Findings(), list(request.columns.values())
    for part in rows.parts:
        for number, row in enumerate(part.values(columns), 1):
            asked, answer, *_ = (row[column] for column in columns)
            if text := wrong_example(asked, answer, apply, end=end):
                what = "what the chat template makes of prompt and response"
                findings.error(text, f"{part.where}, row {number}: {what} {text}")
    findings.check()


def _renderer(args: SimpleNamespace, *, ahead: bool) -> Renderer:
    """What makes the run's prompts. `ahead`: as far as the tokenizer is on this machine."""
    data, name = args.data, args.actor.model_name_or_path
    here = local_tokenizer(name) if ahead or Path(name).is_dir() else name
    fast = not data.disable_fast_tokenizer
    form = {"template": data.input_template, "chat": data.apply_chat_template}
    renderer = Renderer(MODEL, here, **form, fast=fast, quick=ahead)
    if renderer.tokenizer is not None:
        _check_special(f"{MODEL} is {name}", renderer.tokenizer, data.solution_key)
    return renderer


def _check_special(model: str, tokenizer: Tokenizer, solutions: str | None) -> None:
    """Refuse a model without an end token, and special tokens without embeddings. Worked solutions need the former."""
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
    for kind, wrong in zip(special, tokenizer.beyond(list(special.values())), strict=True):
        if wrong:
            raise ConfigError(f"{model}; the {kind} of its tokenizer {wrong}")


def _elsewhere(flag: str, name: str) -> str:
    return f"{flag} is {name}; it is not on this machine and nothing is downloaded here, so no row of it was looked at"


def _unprepared(request: Request) -> list[str]:
    """A warning for each file that is not there yet, if `bapo-openrlhf prepare` makes it."""
    files = [name.strip() for name in (request.names or "").split(",")]
    return [
        f"{request.flag} is {file}; there is no such file yet{sources.preparation(file)}"
        for file in files
        if sources.preparation(file) and not is_file(request.flag, Path(file))
    ]

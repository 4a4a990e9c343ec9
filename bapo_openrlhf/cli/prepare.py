"""`bapo-openrlhf prepare`: write public data sets or generated problems as files that OpenRLHF reads."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.ranges import check_ranges
from bapo_openrlhf.tasks import TASKS, get_task
from bapo_openrlhf.tasks.task import Task
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.prepare.build import Preparation, prepare
from bapo_openrlhf.workbench.prepare.source_rows import FORMATS, parse_local


def main(argv: Sequence[str], prog: str = "bapo-openrlhf prepare") -> int:
    """Parse the flags, prepare the files, and print what was written and what was left out."""
    options = _parser(prog).parse_args(argv)
    task = get_task(options.task)
    if task.configure is not None:
        task = task.configure(options.tasks, options.config)
        if options.generate is None:
            [options.generate] = task.sizes or {}
    elif options.tasks or options.config:
        raise ConfigError(f"--tasks and --config are only for reasoning_gym; the task is {task.name}")
    request = _request(task, options)
    manifest = prepare(task, request)
    console = Console()
    console.print(_table(manifest, request.out).rich())
    for line in _overlap_lines(manifest, request):
        console.print(line, highlight=False, markup=False)
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add("task", help=f"{', '.join(TASKS)}, or a .py file with a TASK of your own")
    add("--out", type=Path, help="folder of the files (default: data/TASK)")
    add("--parts", help="parts to prepare, separated by commas: train, names of benchmarks (default: all)")
    add("--local", action="append", default=[], metavar="PART=PATH", help="local copy of the published data: a "
        f"file ({', '.join(FORMATS)}) or a folder; may be given several times")  # fmt: skip
    add("--generate", metavar="GENERATOR", help="generate problems instead; an unknown name lists the generators")
    add("--tasks", help="kinds of reasoning_gym's problems, separated by commas: NAME, NAME@LEVEL or NAME:WEIGHT")
    add("--config", type=Path, metavar="FILE", help="YAML file of reasoning_gym's kinds: by name the task, level, "
        "weight and parameters of the library")  # fmt: skip
    add("--prompt", help="which prompt of the task (default: the first; an unknown name lists them)")
    add("--size", metavar="PART=N,...", help="most problems of parts; test stands for each benchmark (default: the "
        "number of the paper, or of the generator)")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the order in which one data set is divided into parts, and of "
        "generated problems (default: 0)")  # fmt: skip
    add("--overlap", choices=["report", "drop"], default="report",
        help="report training problems that are in a benchmark, or leave them out (default: report)")  # fmt: skip
    add("--tokenizer", help="model whose tokenizer counts the tokens of prompts, with its chat template if it has one")
    add("--max-prompt-tokens", type=int, default=2048, help="longer prompts are left out (default: 2048)")
    return parser


def _request(task: Task, options: argparse.Namespace) -> Preparation:
    check_ranges({"--max-prompt-tokens": options.max_prompt_tokens}, {"--max-prompt-tokens": "at least 1"})
    return Preparation(
        out=options.out or Path("data") / task.name,
        parts=tuple(part.strip() for part in options.parts.split(",")) if options.parts else None,
        generator=options.generate,
        local=parse_local(options.local, list(task.parts)),
        style=options.prompt,
        seed=options.seed,
        limits=_sizes(options.size, task),
        drop_overlap=options.overlap == "drop",
        tokens=_token_counter(options.tokenizer) if options.tokenizer else None,
        max_tokens=options.max_prompt_tokens,
        tokenizer=options.tokenizer,
    )


def _sizes(words: str | None, task: Task) -> dict[str, int]:
    sizes = {}
    for word in words.split(",") if words else ():
        part, _, number = word.strip().partition("=")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--size is {word!r}; it must be PART=N, and N must be at least 1")
        sizes |= dict.fromkeys(task.benchmarks if part == "test" else [part], int(number))
    return sizes


def _token_counter(name: str) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    except Exception as error:
        raise ConfigError(f"--tokenizer is {name}; it cannot be loaded: {one_line(error)}") from None

    def count(text: str) -> int:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


def _table(manifest: Mapping[str, Any], out: Path) -> Table:
    rows = []
    for part, entry in manifest["parts"].items():
        read = str(entry["read"])
        if entry["published_rows"] not in (None, entry["read"]):
            read += f" (published: {entry['published_rows']})"
        rejected = "; ".join(f"{count} {reason}" for reason, count in entry["rejected"].items()) or "none"
        numbers = (read, str(entry["written"]), str(entry["left_over"]))
        rows.append((part, entry["origin"]["from"], rejected, *numbers))
    head = ("part", "from", "rejected", "read", "written", "left over")
    return Table.of(head, rows, f"{manifest['task']} in {out}", words=3)


def _overlap_lines(manifest: Mapping[str, Any], request: Preparation) -> list[str]:
    lines = []
    if any(entry["rejected"] for entry in manifest["parts"].values()):
        lines.append(f"rejected rows, each with its reason: {request.out}/PART.rejected.jsonl")
    for part, counts in manifest["overlap"]["benchmarks"].items():
        total = manifest["parts"][part]["written"]
        if counts["same"]:
            lines.append(
                f"overlap: {counts['same']} of {total} problems of {part} are in the training data "
                f"({request.out}/overlap.jsonl); --overlap drop leaves them out there"
            )
        else:
            lines.append(f"overlap: no problem of {part} is in the training data")
    return lines

"""`bapo-openrlhf evaluate`: ask a model each problem of some benchmarks several times, and judge the responses.

The scores are shown next to those of the paper's Table 1. The same command resumes an interrupted evaluation.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.ranges import check_template

DEFAULT_KS = (1, 8, 32)


def main(argv: Sequence[str], prog: str = "bapo-openrlhf evaluate") -> int:
    """Parse the flags, evaluate, and print the tables."""
    args = parse(argv, prog)

    from bapo_openrlhf.workbench.evaluation.problems import Columns, Request, Sampling
    from bapo_openrlhf.workbench.evaluation.results import tables
    from bapo_openrlhf.workbench.evaluation.run import evaluate
    from bapo_openrlhf.workbench.pages.table import show

    if args.input_template is not None:
        check_template("input-template", args.input_template)
    name = args.name or _name(Path(args.model))
    ks = _numbers("k", args.k) if args.k else sorted({k for k in DEFAULT_KS if k <= args.runs} | {max(args.runs, 1)})
    values = vars(args) | {
        "name": name,
        "benchmarks": [benchmark.strip() for benchmark in args.benchmarks.split(",") if benchmark.strip()],
        "out": _out(args.out, name),
        "sampling": Sampling(**{item.name: getattr(args, item.name) for item in fields(Sampling)}),
        "ks": ks,
        "columns": Columns(args.input_key, args.label_key, args.image_key),
        "chat_template": not args.no_chat_template if args.input_template is None else args.input_template,
        "reward_range": _range(args.reward_range),
    }
    request = Request(**{item.name: values[item.name] for item in fields(Request)})
    results = evaluate(request)
    show(tables(results), f"results.md, .json and .csv are in {request.out}")
    return 0


def parse(argv: Sequence[str], prog: str = "bapo-openrlhf evaluate") -> argparse.Namespace:
    """The command's flags. The values of a training configuration (--config) replace the defaults."""
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    if args.config:
        trained = _as_trained(args.config)
        if "=" not in args.benchmarks:  # they are judged by their own tasks
            del trained["reward"]
        parser.set_defaults(**trained)
        args = parser.parse_args(argv)
    if not args.model:
        raise ConfigError("model is missing; give --model, or the --config of its training")
    return args


def _as_trained(config: Sequence[str]) -> dict[str, Any]:
    from bapo_openrlhf.cli.arguments import parse as parse_training
    from bapo_openrlhf.flags.sizes import response_tokens

    trained = parse_training(["--config", *config])
    chat, rewards = trained.data.apply_chat_template, trained.reward.remote_url or [""]
    return {
        "model": trained.ckpt.output_dir,
        "no_chat_template": not chat,
        "input_template": None if chat else trained.data.input_template,
        "input_key": trained.data.input_key,
        "label_key": trained.data.label_key or "label",
        "image_key": trained.data.image_key,
        "max_new_tokens": response_tokens(trained),
        "temperature": trained.rollout.temperature,
        "top_p": trained.rollout.top_p,
        "reward": Path(rewards[0]) if rewards[0].endswith(".py") else None,
        "reward_range": trained.adapt.rewards() or (0, 1),
    }


def build_parser(prog: str) -> Parser:
    """The command's flags."""
    parser = Parser(prog, __doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--config", nargs="+", action="extend", help="configuration of a training: evaluate its trained model with the "
        "same prompts and sampling (model, markup, columns, --max-new-tokens, --temperature, --top-p), and its reward "
        "file with its range; other flags override it")  # fmt: skip
    add("--model", help="model folder, or name on the model hub")
    add("--benchmarks", required=True, help="names separated by commas: aime24,amc,... or NAME=FILE (--reward)")
    add("--data", type=Path, default=Path("data"), help="folder that `bapo-openrlhf prepare` wrote to")
    add("--reward", type=Path, help="reward file (reward_func, and answer for maj@n) of benchmarks NAME=FILE")
    add("--reward-range", nargs=2, metavar=("LOW", "HIGH"), default=(0, 1), help="least and greatest reward of that "
        "file: scores are mapped from it to 0 to 100 %%, and a response with the greatest one is solved")  # fmt: skip
    add("--limit", type=int, help="use only so many problems from the start of each benchmark")
    add("--runs", type=int, default=32, help="number of responses to each problem")
    add("--k", help=f"values of k for pass@k; without it {','.join(map(str, DEFAULT_KS))} below the runs, and the runs")
    add("--temperature", type=float, default=1.0, help="temperature of sampling")
    add("--top-p", type=float, default=1.0, help="top-p of sampling")
    add("--top-k", type=int, default=-1, help="top-k of sampling; -1 allows all tokens")
    add("--max-new-tokens", type=int, default=8192, help="tokens of the longest response")
    add("--max-model-len", type=int, help="most tokens of prompt and response; without it the model's own limit")
    add("--skip-long", action="store_true", help="leave out problems that are too long for the model")
    add("--no-chat-template", action="store_true", help="use the problem's text as the prompt")
    add("--input-template", help="your own markup with {} in place of the text, as --data.input_template in training")
    add("--seed", type=int, default=42, help="seed of the responses and of the intervals")
    add("--name", help="name of this evaluation in the tables; without it the name of the model or of its run")
    add("--out", type=Path, help="folder of the results; without it runs/eval/NAME")
    add("--tensor-parallel-size", type=int, default=1, help="number of GPUs that share the model")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of each GPU's memory that vLLM takes")
    add("--max-num-seqs", type=int, help="responses that are generated at the same time; without it vLLM's default. "
        "With 1 no response depends on others; otherwise rounding in a batch has a small effect")  # fmt: skip
    parser.set_defaults(input_key="input", label_key="label", image_key="images")
    return parser


def _range(ends: Sequence[Any]) -> Any:
    from bapo_openrlhf.adapt.rewards import as_range

    try:
        return as_range(ends)
    except ValueError as error:
        raise ConfigError(f"reward-range is {ends}; {error}") from None


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; it must be whole numbers, separated by commas") from None


def _name(model: Path) -> str:
    """The name of the model's folder. It is NAME for runs/NAME/model, the folder into which training writes."""
    return model.parent.name if model.name == "model" and model.parent.name else model.name


def _out(out: Path | None, name: str) -> Path:
    if out is not None:
        return out
    if not name or Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"name is {name!r}; it must be a valid name for a folder: give --name or --out")
    return Path("runs") / "eval" / name

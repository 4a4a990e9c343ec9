"""`bapo-openrlhf init`: write settings, problems and a reward function, to start from with a model of your own."""

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cli.parser import Parser, did_you_mean
from bapo_openrlhf.data.sources import looks_local
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.config import ALGORITHMS
from bapo_openrlhf.user_file import at_home
from bapo_openrlhf.workbench import first_run
from bapo_openrlhf.workbench.first_run import Problems

FILES = {
    "config.yaml": "the settings of the run",
    "train.jsonl": "problems to train on",
    "eval.jsonl": "problems for evaluations during the run",
    "reward.py": 'the reward function, which looks for "Answer: NUMBER"',
    "test_reward.py": "its test",
}
GPUS = (1, 2, 4, 8)  # they divide train.batch_size
GPUS_IN_WORDS = f"{', '.join(map(str, GPUS[:-1]))} or {GPUS[-1]}"
MODEL = "Qwen/Qwen3-0.6B"
SMALL = "smollm2"  # of `bapo-openrlhf model`, which puts it into DIR/model
# What the configuration has for either kind of machine.
ON_GPUS = {
    "together": "true",
    "recompute": "true",
    "forward": "2",
    "backward": "1",
    "stack": "vllm: {num_engines: $gpus, gpu_memory_utilization: 0.5, enable_sleep: true}\n"
    "ds: {zero_stage: 2, enable_sleep: true, attn_implementation: sdpa} # sdpa needs no flash-attn",
}
ON_A_CPU = {
    "together": "false",
    "recompute": "false",
    "forward": "8",
    "backward": "2",
    "stack": "vllm: {num_engines: $gpus, gpu_memory_utilization: 0.5, enforce_eager: true, sync_backend: gloo}\n"
    "ds: {zero_stage: 2, attn_implementation: eager} # a CPU needs these values",
}
# What it has for either kind of advantage: the recipe that docs/results.md measured, or the paper's settings.
GROUP_RELATIVE = {
    "entropy": "null # a bonus would be lost for the responses that are skipped",
    "part": "half of a rollout",
    "penalty": "{init_coef: 0, use_loss: false} # so would a penalty",
    "adapt": "skip_zero_advantage: true # trains on no group whose rewards are all equal; not with ba_ppo\n"
    "  replay_steps: 0 # no replay (X3); the paper has 3\n"
    "  reevaluate_every: 0 # m; 0 is no X2, and the paper has 5\n"
    "  rollout_delay: 1 # v; the paper has 5",
}
WITH_A_CRITIC = {
    "entropy": "0.001",
    "part": "a quarter of a full batch",
    "penalty": "{init_coef: 0.001, use_loss: true, estimator: k3}",
    "adapt": "c1: 1/8\n"
    "  c2: [1/8, 4/8]\n"
    "  c3: [2/8, 5/8]\n"
    "  buffer_size: $prompts # one rollout batch\n"
    "  rollout_delay: 2 # v; the paper has 5\n"
    "  reevaluate_every: 0 # m; 0 is no X2, and the paper has 5",
}


def main(argv: Sequence[str], prog: str = "bapo-openrlhf init") -> int:
    """Write the files into a new or empty folder, and print what they are and what to do next."""
    options = _parser(prog).parse_args(argv)
    folder, here = options.folder, options.folder.resolve()
    if options.algorithm not in ALGORITHMS:
        hint = did_you_mean(options.algorithm, ALGORITHMS)
        raise ConfigError(f"algorithm is {options.algorithm!r}; it must be one of {', '.join(ALGORITHMS)}{hint}")
    if options.gpus not in GPUS:
        raise ConfigError(f"gpus is {options.gpus}; it must be {GPUS_IN_WORDS}. docs/several_machines.md is about more")
    if unusable := re.search(r'[,@"\\]', str(here)):
        raise ConfigError(f"DIR is {here}; its path must not have {unusable[0]}, because OpenRLHF divides flags there")
    texts = _texts(options, here)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"DIR is {folder}; it has files in it already, and must be a new or an empty folder")
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        config = folder / "config.yaml"
        fits = f"\n# {_fits(options, config)}\n"
        config.write_text(texts[config.name].replace("\n# $fits\n", fits), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"DIR is {folder}; it must be a folder that can be written to: {one_line(error)}") from None
    for name, meaning in FILES.items():
        print(f"{folder / name}  {meaning}")
    quoted, config, model = (shlex.quote(str(path)) for path in (folder, config, folder / "model"))
    download = f"bapo-openrlhf model {SMALL} {model}; " if _takes_small(options) else ""
    print(f"next: {download}pytest {quoted}; bapo-openrlhf check --config {config}; docs/own_data.md")
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog, __doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    parser.add_argument("--algorithm", default="bapo_grpo", help=f"{', '.join(ALGORITHMS)} (default: bapo_grpo)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="your problems (.jsonl, .json, .csv or .parquet): "
                        "each tenth is kept for evaluations, at most 100 (default: 64 examples)")  # fmt: skip
    parser.add_argument("--gpus", type=int, default=1, help=f"{GPUS_IN_WORDS} GPUs of one machine (default: 1)")
    parser.add_argument("--cpu", action="store_true", help="for a machine without a GPU; --gpus is then the number of "
                        "processes that a model has")  # fmt: skip
    parser.add_argument("--model", help="a folder, or a name on the model hub (default: "
                        f"{MODEL}, and with --cpu SmolLM2-135M in DIR/model)")  # fmt: skip
    return parser


def _takes_small(options: Namespace) -> bool:
    return options.cpu and options.model is None


def _has_critic(options: Namespace) -> bool:
    return "gae" in ALGORITHMS[options.algorithm].estimators


def _fits(options: Namespace, config: Path) -> str:
    if options.cpu:
        return "A run on a CPU is slow: it is for small models and short responses."
    try:
        memory = first_run.fitting_gpu(arguments.parse(["--config", str(config)]))
    except (ConfigError, ImportError, RuntimeError):  # OpenRLHF may be missing or another, the model no dense decoder
        memory = None
    if memory is None:
        return "`bapo-openrlhf plan --config FILE` says whether they fit, and which flags help."
    return f"They are predicted to fit GPUs of {memory}: `bapo-openrlhf plan --config FILE` says for others."


def _texts(options: Namespace, here: Path) -> dict[str, str]:
    raw = {name: (files("bapo_openrlhf.workbench") / "init" / name).read_text(encoding="utf-8") for name in FILES}
    if options.data is None:
        rows = [[json.loads(line) for line in raw[f"{name}.jsonl"].splitlines()] for name in ("train", "eval")]
        problems = Problems("input", "label", *rows)
    else:
        problems = first_run.problems_in(options.data)
        for name, rows in (("train", problems.train), ("eval", problems.held_out)):
            raw[f"{name}.jsonl"] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    parts = (ON_A_CPU if options.cpu else ON_GPUS) | (WITH_A_CRITIC if _has_critic(options) else GROUP_RELATIVE)
    config = Template(Template(raw["config.yaml"]).safe_substitute(parts))
    text = config.substitute(_settings(options, here, problems))
    return raw | {"config.yaml": _without_effect(text, options.algorithm)}


def _settings(options: Namespace, here: Path, problems: Problems) -> Mapping[str, str]:
    name = options.model or (str(here / "model") if options.cpu else MODEL)
    path = at_home(name)
    if path.is_dir() or looks_local(name):
        name = str(path.resolve())
    small = _takes_small(options)
    model = first_run.SMOLLM2 if small else first_run.look_at_model(name)
    updates = 4 if _has_critic(options) else 2
    numbers = first_run.numbers_for(len(problems.train), model, updates=updates, cpu=options.cpu)
    purpose = first_run.meant_for("SmolLM2-135M-Instruct" if small else name, model, options.gpus, cpu=options.cpu)
    return {
        **numbers,
        "meant": f"{purpose} and {len(problems.train)} problems",
        "fits": "$fits",  # which follows from the rest
        "here": str(here),
        "algorithm": options.algorithm,
        "gpus": str(options.gpus),
        "model": json.dumps(name, ensure_ascii=False),
        "input_key": json.dumps(problems.input_key, ensure_ascii=False),
        "label_key": json.dumps(problems.label_key, ensure_ascii=False),
    }


def _without_effect(config: str, algorithm: str) -> str:
    """The configuration with the section `adapt` in comments, if the algorithm adapts no batches."""
    if ALGORITHMS[algorithm].method != "none":
        return config
    return re.sub(r"(?ms)^adapt:.*?\n\n", lambda section: re.sub(r"(?m)^(?=.)", "# ", section[0]), config)

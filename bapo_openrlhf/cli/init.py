"""`bapo-openrlhf init`: write settings, problems and a reward function, to start from with a model of your own."""

import json
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from bapo_openrlhf.cli.parser import Parser, did_you_mean
from bapo_openrlhf.data.sources import looks_local
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.config import ALGORITHMS
from bapo_openrlhf.user_file import at_home

FILES = {
    "config.yaml": "the settings of the run",
    "train.jsonl": "64 problems; put yours in their place",
    "eval.jsonl": "problems for evaluations during the run",
    "reward.py": "the reward function",
    "test_reward.py": "its test",
}
GPUS = (1, 2, 4, 8)  # they divide train.batch_size
GPUS_IN_WORDS = f"{', '.join(map(str, GPUS[:-1]))} or {GPUS[-1]}"
MODEL = "Qwen/Qwen3-0.6B"


def main(argv: Sequence[str], prog: str = "bapo-openrlhf init") -> int:
    """Write the files into a new or empty folder, and print what they are and what to do next."""
    parser = Parser(prog, __doc__.split(": ", 1)[1])
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    parser.add_argument("--algorithm", default="bapo_grpo", help=f"{', '.join(ALGORITHMS)} (default: bapo_grpo)")
    parser.add_argument("--gpus", type=int, default=1, help=f"{GPUS_IN_WORDS} GPUs of one machine (default: 1)")
    parser.add_argument("--model", default=MODEL, help=f"a folder, or a name on the model hub (default: {MODEL})")
    given = parser.parse_args(list(argv))
    folder, here = given.folder, given.folder.resolve()
    settings = {"here": here, **_settings(given.algorithm, given.gpus, given.model)}
    if unusable := re.search(r'[,@"\\]', str(here)):
        raise ConfigError(f"DIR is {here}; its path must not have {unusable[0]}, because OpenRLHF divides flags there")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"DIR is {folder}; it has files in it already, and must be a new or an empty folder")
        for name in FILES:
            text = (files("bapo_openrlhf.workbench") / "init" / name).read_text(encoding="utf-8")
            if name == "config.yaml":
                text = _without_effect(Template(text).substitute(settings), given.algorithm)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"DIR is {folder}; it must be a folder that can be written to: {one_line(error)}") from None
    for name, meaning in FILES.items():
        print(f"{folder / name}  {meaning}")
    shown, config = (shlex.quote(str(path)) for path in (folder, folder / "config.yaml"))
    print(f"next: pytest {shown}; bapo-openrlhf check --config {config}; docs/own_data.md")
    return 0


def _settings(algorithm: str, gpus: int, model: str) -> dict[str, str]:
    """What the user chose, as the words of the configuration."""
    if algorithm not in ALGORITHMS:
        hint = did_you_mean(algorithm, ALGORITHMS)
        raise ConfigError(f"algorithm is {algorithm!r}; it must be one of {', '.join(ALGORITHMS)}{hint}")
    if gpus not in GPUS:
        raise ConfigError(f"gpus is {gpus}; it must be {GPUS_IN_WORDS}. docs/several_machines.md is about more")
    path = at_home(model)
    name = str(path.resolve()) if path.is_dir() or looks_local(model) else model
    return {"algorithm": algorithm, "gpus": str(gpus), "model": json.dumps(name, ensure_ascii=False)}


def _without_effect(config: str, algorithm: str) -> str:
    """The configuration with the section `adapt` in comments, if the algorithm adapts no batches."""
    if ALGORITHMS[algorithm].method != "none":
        return config
    return re.sub(r"(?ms)^adapt:.*?\n\n", lambda section: re.sub(r"(?m)^(?=.)", "# ", section[0]), config)

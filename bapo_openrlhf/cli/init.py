"""`bapo-openrlhf init`: write settings, problems and a reward function, to start from with a model of your own."""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError, one_line

FILES = {
    "config.yaml": "the settings of the run",
    "train.jsonl": "ten problems; put yours in their place",
    "eval.jsonl": "problems for evaluations during the run",
    "reward.py": "the reward function",
    "test_reward.py": "its test",
}


def main(argv: Sequence[str], prog: str = "bapo-openrlhf init") -> int:
    """Write the files into a new or empty folder, and print what they are and what to do next."""
    parser = Parser(prog, __doc__.split(": ", 1)[1])
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    folder = parser.parse_args(list(argv)).folder.expanduser()
    here = folder.resolve()
    if unusable := re.search(r'[,@"\\]', str(here)):
        raise ConfigError(f"DIR is {here}; its path must not have {unusable[0]}, because OpenRLHF divides flags there")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"DIR is {folder}; it has files in it already, and must be a new or an empty folder")
        for name in FILES:
            text = (files("bapo_openrlhf.workbench") / "init" / name).read_text(encoding="utf-8")
            text = Template(text).substitute(here=here) if name == "config.yaml" else text
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"DIR is {folder}; it must be a folder that can be written to: {one_line(error)}") from None
    for name, meaning in FILES.items():
        print(f"{folder / name}  {meaning}")
    print(f"next: pytest {folder}; bapo-openrlhf check --config {folder}/config.yaml; docs/own_model.md")
    return 0

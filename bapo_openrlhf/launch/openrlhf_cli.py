"""OpenRLHF's own command line: its parser and its checks, without importing its stack.

OpenRLHF builds its parser and validates the arguments under `if __name__ == "__main__"` of a script in its folder
`cli`, where no other module can import them. Therefore this module reads that block from the installed file and runs
its statements in the same order. The statements before `parser.parse_args()` make the parser. The statements between it
and `train(args)` check and complete the arguments. So this project repeats no line of the block, and all of OpenRLHF's
flags keep their meaning.
"""

import argparse
import ast
from functools import cache
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.training.contract import OPENRLHF_VERSION, file_of, module_of

PPO, SFT, SERVER = "train_ppo_ray", "train_sft", "serve_rm"  # scripts: training on rewards, supervised, reward server


def _is_call(node: ast.stmt, target: str) -> bool:
    """Whether a statement is `target(...)` or `name = target(...)`."""
    value = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == target


def _block(script: str) -> tuple[list[ast.stmt], str]:
    """The statements of the block, and the path of the script.

    Raises:
        RuntimeError: The script has no such block that begins with a parser.
    """
    path = file_of(f"cli/{script}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    body = blocks[0].body if len(blocks) == 1 else []
    if not body or not _is_call(body[0], "argparse.ArgumentParser"):
        raise _other_layout(path)
    return body, str(path)


@cache
def _main_block(script: str) -> tuple[list[ast.stmt], list[ast.stmt], str]:
    """The statements before and after `args = parser.parse_args()`, without the final `train(args)`, and the path."""
    body, path = _block(script)
    parse = [index for index, node in enumerate(body) if _is_call(node, "parser.parse_args")]
    if len(parse) != 1 or not _is_call(body[-1], "train"):
        raise _other_layout(path)
    return body[: parse[0]], body[parse[0] + 1 : -1], path


def _other_layout(path: object) -> RuntimeError:
    return RuntimeError(f"{path} is not laid out as openrlhf {OPENRLHF_VERSION}'s is")


def _run(statements: list[ast.stmt], path: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(ast.Module(body=statements, type_ignores=[]), path, "exec"), names)
    return names


def run_block(script: str, names: dict[str, Any]) -> None:
    """Run all statements of a script's block, which then reads these names in the place of the script's own."""
    _run(*_block(script), names)


def build_parser(script: str = PPO) -> argparse.ArgumentParser:
    """OpenRLHF's argument parser, with every flag of `python -m openrlhf.cli.SCRIPT`."""
    from datetime import datetime

    before, _, path = _main_block(script)
    return _run(before, path, {"argparse": argparse, "datetime": datetime})["parser"]


def validate(flat: argparse.Namespace, script: str = PPO) -> SimpleNamespace:
    """Apply OpenRLHF's own checks and derived defaults to parsed arguments.

    Returns:
        The nested namespace (args.actor.adam.lr) that OpenRLHF's `train` takes.

    Raises:
        ConfigError: One of OpenRLHF's assertions failed, and the message has its text; or it needs another package.
    """
    _, after, path = _main_block(script)
    statements = [
        node for node in after if not (isinstance(node, ast.ImportFrom) and node.names[0].name == "hierarchize")
    ]
    names = {"args": flat, "hierarchize": module_of("utils/config.py").hierarchize}
    try:
        return _run(statements, path, names)["args"]
    except AssertionError as error:
        raise ConfigError(f"OpenRLHF refuses this configuration: {error}") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"this configuration needs the package {error.name}, which is not installed") from None

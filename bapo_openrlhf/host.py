"""OpenRLHF as it is installed: its version, its files, its classes, and the block of its command line.

This is the only file that knows where things are in OpenRLHF. Anything else than expected stops the run at its start.

OpenRLHF builds its parser and validates the arguments under `if __name__ == "__main__"` of a script in its folder
`cli`, where no other module can import them. Therefore this file reads that block from the installed script and runs
its statements: those before `parser.parse_args()` make the parser, and those between it and `train(args)` check and
complete the arguments. So all of OpenRLHF's flags keep their meaning.
"""

import argparse
import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

from bapo_openrlhf.errors import ConfigError

OPENRLHF_VERSION = "0.11.2"
PPO, SERVER = "train_ppo_ray", "serve_rm"  # scripts: training on rewards, reward server

Method = TypeVar("Method", bound=Callable[..., Any])
EXTENDED: list[tuple[type, Callable[..., Any]]] = []  # a class of OpenRLHF, and our override


def require_version() -> None:
    """Raise RuntimeError if the installed OpenRLHF is not the one that this package extends, ConfigError if none is."""
    try:
        version = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "openrlhf is not installed; a run needs `make` or `make install-gpu`, and for check and plan "
            f"`pip install '.[check]'` and `pip install --no-deps openrlhf=={OPENRLHF_VERSION}` are enough"
        ) from None
    if version != OPENRLHF_VERSION:
        raise RuntimeError(f"openrlhf {version} is installed; bapo_openrlhf extends openrlhf {OPENRLHF_VERSION}")


def file_of(relative: str) -> Path:
    """The path of an installed file of OpenRLHF, such as "utils/config.py"."""
    require_version()
    # The path is built from the package's folder, because finding the spec of a submodule would import its parents.
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.origin is not None  # its version is known
    return Path(spec.origin).parent / relative


@cache
def module_of(relative: str) -> ModuleType:
    """A module of OpenRLHF, loaded from its file, because its package would import Ray, DeepSpeed and vLLM."""
    return load_file(relative, "_openrlhf_" + relative.removesuffix(".py").replace("/", "_"))


def load_file(relative: str, name: str) -> ModuleType:
    """A new module that has this name, and the content of a file of OpenRLHF."""
    spec = importlib.util.spec_from_file_location(name, file_of(relative))
    assert spec is not None and spec.loader is not None  # a .py file has both
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_name(module: ModuleType | type, name: str) -> Any:
    """The attribute `name` of an OpenRLHF module or class; RuntimeError if this version has none."""
    if not hasattr(module, name):
        raise RuntimeError(
            f"openrlhf {OPENRLHF_VERSION} should have {module.__name__}.{name}; the installed one has not"
        )
    return getattr(module, name)


def plain_class(ray_actor_class: Any) -> type:
    """The class that `@ray.remote` decorated, to inherit from."""
    return ray_actor_class.__ray_metadata__.modified_class


def extends(base: type) -> Callable[[Method], Method]:
    """Mark a method that overrides one of OpenRLHF's class `base`; a RuntimeError at import if that has no such method.

    tools/openrlhf_contract.py records the overridden methods, and tells what another version of OpenRLHF changes.
    """

    def check(method: Method) -> Method:
        require_name(base, method.__name__)
        EXTENDED.append((base, method))
        return method

    return check


def _is_call(node: ast.stmt, target: str) -> bool:
    value = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == target


def _block(script: str) -> tuple[list[ast.stmt], str]:
    """The statements of the block, which begins with a parser, and the path of the script; or a RuntimeError."""
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
    statements, _, path = _main_block(script)
    return _run(statements, path, {"argparse": argparse, "datetime": datetime})["parser"]


def validate(flat: argparse.Namespace) -> SimpleNamespace:
    """OpenRLHF's own checks and derived defaults: the nested namespace that its `train` takes, or a ConfigError."""
    _, checks, path = _main_block(PPO)
    statements = [
        node for node in checks if not (isinstance(node, ast.ImportFrom) and node.names[0].name == "hierarchize")
    ]
    names = {"args": flat, "hierarchize": module_of("utils/config.py").hierarchize}
    try:
        return _run(statements, path, names)["args"]
    except AssertionError as error:
        raise ConfigError(f"OpenRLHF refuses this configuration: {error}") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"this configuration needs the package {error.name}, which is not installed") from None

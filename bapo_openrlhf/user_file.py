"""Files of the user's own: Python (a method, a task or a reward function) and YAML (flags or a study)."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml  # type: ignore[import-untyped]

from bapo_openrlhf.errors import ConfigError, one_line


def start_of(path: Path) -> str:
    """The folder from which a relative path starts. Errors name it."""
    return "" if path.expanduser().is_absolute() else f" in the working directory {Path.cwd()}"


def load(field: str, path: Path) -> ModuleType:
    """The module that a file holds; the same one each time, so that its classes are the same.

    Args:
        field: the flag or field that names the file. Errors name it.

    Raises:
        ConfigError: it is not there, or cannot be imported.
    """
    path = path.expanduser()
    name = f"bapo_openrlhf_user_{path.resolve().as_posix()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ConfigError(f"{field} is {path}; there is no such file{start_of(path)}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file has both
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{field} {path} cannot be imported: {one_line(error)}") from error
    return module


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader takes the last of two equal keys; this one refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line:
                raise ConfigError(f"line {line}: {key.value} is there already, in line {lines[key.value]}; remove one")
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def read_yaml(field: str, path: Path) -> Any:
    """The content of a YAML file.

    Args:
        field: the flag or field that names the file. Errors name it.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has a key twice.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except ConfigError as error:
        raise ConfigError(f"{field} {path}, {error}") from None
    except OSError as error:
        raise ConfigError(f"{field} {path} cannot be read: {error.strerror}{start_of(path)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field} {path} is not valid YAML: {' '.join(str(error).split())}") from None

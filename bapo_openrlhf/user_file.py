"""A Python file of the user's own: a method, a task or a reward function."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from bapo_openrlhf.errors import ConfigError


def load(field: str, path: Path) -> ModuleType:
    """The module that a file holds; the same one each time, so that its classes are the same.

    Args:
        field: what names the file, for the errors.

    Raises:
        ConfigError: it is not there, or cannot be imported.
    """
    path = path.expanduser()
    name = f"bapo_openrlhf_user_{path.resolve().as_posix()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ConfigError(f"{field} is {path}; there is no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file has both
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"{field} {path} cannot be imported: {what}") from error
    return module

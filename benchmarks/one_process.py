"""Ray in one process, and a vLLM that is only imported, for benchmarks/gpu_training.py.

OpenRLHF's models are Ray actors, and its modules import Ray and vLLM. In the block `stand_ins()` they import what
stands here. An actor is then an object of this process, and a remote call is an ordinary call that is made at once. As
in Ray, an actor gets copies of its arguments.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

SECONDS: Counter[str] = Counter()  # spent in the actors' methods, by name; those of a batch by what it executes


class Ref:
    """A reference to a value. A list of references is got as a list of values."""

    def __init__(self, value: Any) -> None:
        self.value = value


def get(refs: Any) -> Any:
    """What `ray.get` returns."""
    return [get(ref) for ref in refs] if isinstance(refs, list) else refs.value


class Handle:
    """The handle of an actor. Each of its methods has a `remote`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(self.actor, name)

        def remote(*args: Any, **kwargs: Any) -> Ref:
            args = tuple(arg.value if isinstance(arg, Ref) else arg for arg in args)
            args, kwargs = copy.deepcopy((args, kwargs))
            start = time.perf_counter()
            value = method(*args, **kwargs)
            SECONDS[args[0] if name == "execute_batch" else name] += time.perf_counter() - start
            return Ref(value)

        return SimpleNamespace(remote=remote)


class ActorClass:
    """A class that `ray.remote` decorated."""

    def __init__(self, plain: type) -> None:
        self.plain = plain
        self.__ray_metadata__ = SimpleNamespace(modified_class=plain)  # the project's classes inherit from it

    def options(self, **_: Any) -> ActorClass:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Handle:
        return Handle(self.plain(*args, **kwargs))


def remote(*plain: type, **_: Any) -> Any:
    """What `ray.remote` does, with options and without."""
    return ActorClass(*plain) if plain else ActorClass


def _absent(*_: Any, **__: Any) -> None:
    raise RuntimeError("this process has neither Ray's cluster nor vLLM")


_SERVICES = SimpleNamespace(services=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
MODULES: dict[str, dict[str, Any]] = {
    "ray": {"remote": remote, "get": get, "put": Ref, "_private": _SERVICES},
    "ray.util.placement_group": {"PlacementGroup": object, "placement_group": _absent},
    "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": _absent},
    "vllm": {},
    "vllm.inputs": {"TokensPrompt": _absent},
    "vllm.utils": {"random_uuid": _absent},
}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let Ray and vLLM be imported as what stands here, only inside the block.

    OpenRLHF keeps what it has imported. If the stand-ins stayed, other packages would believe that Ray is installed.
    """
    packages = {name.partition(".")[0] for name in MODULES}
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    for name in before:
        del sys.modules[name]
    for name, attributes in MODULES.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)

"""Fixtures for tests on the fake stack, which is in `fake_stack`."""

import itertools
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()  # before anything imports torch, Ray, DeepSpeed or vLLM
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's calls answer at once."""
    import fake_stack
    import ray

    monkeypatch.setattr(ray, "get", fake_stack.get)
    monkeypatch.setattr(ray, "wait", fake_stack.wait)
    monkeypatch.setattr(ray, "put", lambda value: fake_stack.Ref(value))


@pytest.fixture
def values_for_refs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference of Ray is its value; what was sent last is finished first."""
    import ray

    monkeypatch.setattr(ray, "get", lambda refs, **_: refs)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs[-1:], refs[:-1]))
    monkeypatch.setattr(ray, "put", lambda value: value)


@pytest.fixture
def world(tmp_path: Path, no_ray: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a world with a trainer in it; `world(**{"adapt.c1": 0})` changes flags. Its model has no folder."""
    from fake_stack import AdaptedPPOTrainer, World

    from bapo_openrlhf.training.trainer import proof

    monkeypatch.setattr(proof, "reason_to_differ", lambda args: None)
    numbers = itertools.count()

    def make(*, folder: Path | None = None, kind: type = AdaptedPPOTrainer, **words: Any) -> World:
        sizes = {name: words.pop(name) for name in ("prompts", "evaluation", "engines") if name in words}
        run = World(folder or tmp_path / str(next(numbers)), words, **sizes)
        run.make_trainer(kind)
        return run

    return make


@pytest.fixture
def fitted(world: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a world as `world` does, and trains to the end. Rewards may be others, and tokens may be spoilt."""

    def make(*, reward: Callable[..., Any] | None = None, spoilt: Collection[int] = (), **words: Any) -> Any:
        run = world(**words)
        run.reward, run.spoilt = reward or run.reward, {*spoilt}
        run.trainer.fit()
        return run

    return make

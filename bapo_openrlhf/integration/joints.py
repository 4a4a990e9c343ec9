"""The OpenRLHF version this was written for, and the names of OpenRLHF that are rebound, all in one place.

Everything else extends OpenRLHF by subclassing. A name that is missing, or another version, stops the run at its start
with an error that says so.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

OPENRLHF_VERSION = "0.11.2"


def require_version() -> None:
    """Raise RuntimeError unless the installed OpenRLHF is the one that the joints were written for."""
    try:
        found = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != OPENRLHF_VERSION:
        raise RuntimeError(f"openrlhf {found} is installed; bapo_openrlhf extends openrlhf {OPENRLHF_VERSION}")


def require_name(module: ModuleType | type, name: str) -> Any:
    """The attribute `name` of an OpenRLHF module or class; RuntimeError when this version has none."""
    if not hasattr(module, name):
        raise RuntimeError(
            f"openrlhf {OPENRLHF_VERSION} should have {module.__name__}.{name}; the installed one has not"
        )
    return getattr(module, name)


def plain_class(ray_actor_class: Any) -> type:
    """The class under a `@ray.remote` class, to inherit from."""
    return ray_actor_class.__ray_metadata__.modified_class


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


def with_rollout_log_probs(create_vllm_engines: Any) -> Any:
    """OpenRLHF's `create_vllm_engines`, with engines that return log-probs of the distribution they sample from.

    OpenRLHF asks for them only when its importance-sampling correction is on. `processed_logprobs` are those after
    temperature, top-p and top-k: the log-probs of the behaviour policy alpha in Eq. 3 and 4.
    """
    signature = inspect.signature(create_vllm_engines)
    if "logprobs_mode" not in signature.parameters:
        raise RuntimeError(f"openrlhf {OPENRLHF_VERSION}: create_vllm_engines should take logprobs_mode")

    def create(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["logprobs_mode"] = "processed_logprobs"
        return create_vllm_engines(*bound.args, **bound.kwargs)

    return create


@contextmanager
def batch_adaptation(adapted: bool) -> Iterator[ModuleType]:
    """OpenRLHF's `train_ppo_ray` module with this project's classes in the place of OpenRLHF's.

    Args:
        adapted: False leaves everything as OpenRLHF has it, but for a trainer that also keeps a local record.
    """
    require_version()
    import openrlhf.cli.train_ppo_ray as cli
    import openrlhf.trainer.ppo_trainer as ppo_trainer
    import openrlhf.trainer.ray.vllm_engine as vllm_engine

    from bapo_openrlhf.integration import engines, trainer, workers

    if not adapted:
        with rebound(ppo_trainer, PPOTrainer=trainer.RecordedPPOTrainerActor):
            yield cli
        return
    with (
        rebound(ppo_trainer, PPOTrainer=trainer.AdaptedPPOTrainerActor),
        rebound(vllm_engine, RolloutRayActor=engines.AdaptedRolloutActor),
        rebound(
            cli,
            PolicyModelActor=workers.AdaptedPolicyActor,
            CriticModelActor=workers.AdaptedCriticActor,
            create_vllm_engines=with_rollout_log_probs(require_name(cli, "create_vllm_engines")),
        ),
    ):
        yield cli

"""The names of OpenRLHF that are rebound for a run, all in one place.

Everything else extends OpenRLHF by subclassing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import openrlhf.cli.train_ppo_ray as cli
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ray import vllm_engine

from bapo_openrlhf.training import dealing, engines, plain_trainer, trainer, workers
from bapo_openrlhf.training.contract import OPENRLHF_VERSION, rebound, require_name, require_version


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
        adapted: False leaves everything as OpenRLHF has it, but for a trainer that also keeps a local
            record and workers that keep their port.
    """
    require_version()
    either = {"ReferenceModelActor": workers.ReferenceActor, "RewardModelActor": workers.RewardActor}
    if not adapted:
        plain = {"PolicyModelActor": workers.PlainPolicyActor, "CriticModelActor": workers.PlainCriticActor}
        with rebound(ppo_trainer, PPOTrainer=plain_trainer.RecordedPPOTrainerActor), rebound(cli, **plain, **either):
            yield cli
        return
    with (
        rebound(ppo_trainer, PPOTrainer=trainer.AdaptedPPOTrainerActor),
        rebound(vllm_engine, RolloutRayActor=engines.AdaptedRolloutActor),
        rebound(
            cli,
            PolicyModelActor=workers.AdaptedPolicyActor,
            CriticModelActor=workers.AdaptedCriticActor,
            RayActorGroup=dealing.DealtActorGroup,
            **either,
            create_vllm_engines=with_rollout_log_probs(require_name(cli, "create_vllm_engines")),
        ),
    ):
        yield cli

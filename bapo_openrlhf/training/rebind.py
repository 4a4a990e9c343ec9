"""The names of OpenRLHF that are bound to this project's classes for a run, all in one place.

Everything else extends OpenRLHF by subclassing.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import openrlhf.cli.train_ppo_ray as cli
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import vllm_engine

from bapo_openrlhf.training import dealing, engines, plain_trainer, trainer, workers
from bapo_openrlhf.training.contract import OPENRLHF_VERSION, rebound, require_name, require_version


def with_rollout_log_probs(create_vllm_engines: Callable[..., Any]) -> Callable[..., Any]:
    """OpenRLHF's `create_vllm_engines`, with engines that return log-probs of the distribution they sample from.

    OpenRLHF asks for these log-probs only if its importance-sampling correction is on. `processed_logprobs` are
    computed after temperature, top-p and top-k. They are the log-probs of the behaviour policy alpha in Eq. 3 and 4.
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
def openrlhf_for_a_run(adapted: bool) -> Iterator[ModuleType]:
    """OpenRLHF's module `train_ppo_ray`, which uses this project's classes within the block.

    Args:
        adapted: Whether batches are adapted. If not, OpenRLHF's trainer and workers compute what they always compute.
            Only the record, the transport of prompts, responses and weights, and the limits of the reward function are
            this project's then.
    """
    require_version()
    with (
        rebound(cli, ReferenceModelActor=workers.ReferenceActor, RewardModelActor=workers.RewardActor),
        rebound(vllm_engine, RolloutRayActor=engines.RolloutActor),
    ):
        if not adapted:
            with (
                rebound(ppo_trainer, PPOTrainer=plain_trainer.RecordedPPOTrainerActor),
                rebound(cli, PolicyModelActor=workers.PlainPolicyActor, CriticModelActor=workers.PlainCriticActor),
            ):
                yield cli
            return
        with (
            rebound(ppo_trainer, PPOTrainer=trainer.AdaptedPPOTrainerActor),
            rebound(ppo_trainer_async, PPOTrainerAsync=trainer.AdaptedPPOTrainerActor),
            rebound(
                cli,
                PolicyModelActor=workers.AdaptedPolicyActor,
                CriticModelActor=workers.AdaptedCriticActor,
                RayActorGroup=dealing.DealtActorGroup,
                create_vllm_engines=with_rollout_log_probs(require_name(cli, "create_vllm_engines")),
            ),
        ):
            yield cli

"""The processes of actor, critic, reference and reward model."""

import socket
from collections.abc import Hashable
from typing import Any

import ray
import torch
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic

from bapo_openrlhf.flags.sizes import pretraining_steps
from bapo_openrlhf.training.contract import extends, plain_class, rebound
from bapo_openrlhf.training.dealing import Packed, packed, unpacked
from bapo_openrlhf.training.gradients import probe_gradients
from bapo_openrlhf.training.log_probs import SlicedActor
from bapo_openrlhf.training.rotary import restore_frequencies
from bapo_openrlhf.training.updates import WholeBatchActorTrainer, WholeBatchCriticTrainer
from bapo_openrlhf.training.weight_sync import ParcelActorTrainer
from bapo_openrlhf.training.whole_batch import WholeBatchReplayBuffer

POLICY, CRITIC = plain_class(ppo_actor.PolicyModelActor), plain_class(ppo_critic.CriticModelActor)
REFERENCE, REWARD = plain_class(launcher.ReferenceModelActor), plain_class(launcher.RewardModelActor)


class _Worker:
    """A mixin for OpenRLHF's workers, which keeps the port of their process group, and rotary frequencies in float32.

    OpenRLHF chooses a free port, releases it, and listens on it only after the models' processes have started. In the
    meantime an engine or Ray may take the port. Here the socket with which the port was chosen stays bound. The kernel
    then gives the port to no process that asks for any free port. torch can listen on it, because torch binds with
    SO_REUSEADDR, as this socket does.
    """

    @extends(launcher.BaseDistributedActor)
    def _get_free_port(self) -> int:
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("", 0))
        return self._port_holder.getsockname()[1]

    @extends(POLICY)
    @extends(CRITIC)
    @extends(REFERENCE)
    @extends(REWARD)
    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Load all models and the checkpoint, and then repair what ZeRO stage 3 rounded (see `rotary`)."""
        super().init_model_from_pretrained(*args, **kwargs)
        for model in vars(self).values():
            if isinstance(model, torch.nn.Module):
                restore_frequencies(model)

    @extends(launcher.BaseModelActor)
    def execute_batch(self, method_name: str, all_data: Any, start_idx: int, end_idx: int) -> list[Any]:
        """Call a method for each item. The answers travel as the inputs did, as arrays or as tensors."""
        if not isinstance(all_data, Packed):
            return super().execute_batch(method_name, all_data, start_idx, end_idx)
        return packed(super().execute_batch(method_name, unpacked(dict(all_data)), start_idx, end_idx))


class _TrainingWorker(_Worker):
    """A mixin for OpenRLHF's workers that train.

    They take the shares that `dealing.shares` sends, and give checkpoints the state of the generator that shuffles the
    samples.
    """

    def rng_state(self) -> list[torch.Tensor]:
        """States of torch's generators as uint8: of the CPU, and of this rank's GPU if there is one."""
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states

    def set_rng_state(self, states: list[torch.Tensor]) -> None:
        """Restore what `rng_state` returned."""
        torch.set_rng_state(states[0])
        if len(states) > 1 and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[1])

    def _require_trainer(self, kind: type) -> None:
        """Raise RuntimeError if OpenRLHF built its own class, because gradients would then leak into the next batch."""
        for built, needed in ((self.trainer, kind), (self.trainer.replay_buffer, WholeBatchReplayBuffer)):
            if not isinstance(built, needed):
                raise RuntimeError(f"OpenRLHF's worker built a {type(built).__name__} and not a {needed.__name__}")

    @extends(POLICY)
    @extends(CRITIC)
    def append(self, experience: Any, filler: Any, samples: int) -> None:
        """Take this rank's share of a batch, see `WholeBatchReplayBuffer.take`."""
        self.trainer.replay_buffer.take(experience, filler, samples)


class PolicyWorker(_TrainingWorker, POLICY):
    """OpenRLHF's actor worker on batches of any size."""

    @extends(POLICY)
    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        trainer, replay_buffer = WholeBatchActorTrainer, WholeBatchReplayBuffer
        with rebound(ppo_actor, Actor=SlicedActor, ActorPPOTrainer=trainer, NaiveReplayBuffer=replay_buffer):
            super().init_model_from_pretrained(*args, **kwargs)
        self._require_trainer(WholeBatchActorTrainer)

    def probe_gradients(self, **parts: Any) -> dict[Hashable, tuple[float, float]]:
        """See `probe.probe_gradients`."""
        return probe_gradients(self.trainer, self.trainer.tokenizer.pad_token_id, **parts)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the schedule's learning rate by the factor in the optimizer steps that follow."""
        self.trainer.rate_factor = factor


class CriticWorker(_TrainingWorker, CRITIC):
    """OpenRLHF's critic worker on batches of any size."""

    @extends(CRITIC)
    def init_model_from_pretrained(self, strategy: Any, pretrain: str, max_steps: int) -> None:
        """Load the model. The learning-rate schedule also spans the steps of the critic's pretraining."""
        max_steps += pretraining_steps(strategy.args)
        with rebound(ppo_critic, CriticPPOTrainer=WholeBatchCriticTrainer, NaiveReplayBuffer=WholeBatchReplayBuffer):
            super().init_model_from_pretrained(strategy, pretrain, max_steps)
        self._require_trainer(WholeBatchCriticTrainer)


class ReferenceWorker(_Worker, REFERENCE):
    """OpenRLHF's reference worker."""

    @extends(REFERENCE)
    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        with rebound(launcher, Actor=SlicedActor):
            super().init_model_from_pretrained(*args, **kwargs)


class RewardWorker(_Worker, REWARD):
    """OpenRLHF's reward worker."""


class PlainPolicyWorker(_Worker, POLICY):
    """OpenRLHF's actor worker, for a run without batch adaptation."""

    @extends(POLICY)
    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        with rebound(ppo_actor, Actor=SlicedActor, ActorPPOTrainer=ParcelActorTrainer):
            super().init_model_from_pretrained(*args, **kwargs)


class PlainCriticWorker(_Worker, CRITIC):
    """OpenRLHF's critic worker, for a run without batch adaptation."""


# The decorated classes have other names, so that Ray's workers import the classes above from this module. If the name
# of a class led to another object, Ray would send the class by value, with copies of OpenRLHF's globals, and rebinding
# a name in OpenRLHF's module would have no effect on it.
AdaptedPolicyActor = ray.remote(num_gpus=1)(PolicyWorker)
AdaptedCriticActor = ray.remote(num_gpus=1)(CriticWorker)
ReferenceActor = ray.remote(num_gpus=1)(ReferenceWorker)
RewardActor = ray.remote(num_gpus=1)(RewardWorker)
PlainPolicyActor = ray.remote(num_gpus=1)(PlainPolicyWorker)
PlainCriticActor = ray.remote(num_gpus=1)(PlainCriticWorker)

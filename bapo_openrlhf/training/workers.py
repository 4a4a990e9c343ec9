"""Actor and critic workers that train on a batch of any size.

OpenRLHF steps the optimizer when DeepSpeed has counted `train.batch_size` samples. The size of an adapted batch is
seldom a multiple of this, so the rest would stay in the gradient buffers and leak into the next step. Here the last
optimizer step of a batch takes the samples that are left. Its loss is normalised over the tokens that are really in it,
because OpenRLHF normalises each accumulation window by its tokens. With dynamic batching, OpenRLHF decides for each
micro-batch whether a step follows it, and here DeepSpeed is told the same. Otherwise it would keep, under ZeRO-1 and 2,
only the gradient of the last micro-batch of a step.

A rank that has one micro-batch less than another rank trains on a filler, a fully masked sample (see `dealing`). A
filler adds nothing to a gradient, to a metric or to the auxiliary loss of a mixture of experts.

One thing is added that OpenRLHF's actor does not do: a factor on the learning rate.
"""

import socket
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ray
import torch
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic

from bapo_openrlhf.adapt.arithmetic import MicroBatch, pretraining_steps
from bapo_openrlhf.training.contract import extends, plain_class, rebound
from bapo_openrlhf.training.dealing import Packed, packed, unpacked
from bapo_openrlhf.training.gradients import probe_gradients
from bapo_openrlhf.training.log_probs import SlicedActor
from bapo_openrlhf.training.weight_sync import in_parcels
from bapo_openrlhf.training.whole_batch import WholeBatchLoader, WholeBatchReplayBuffer, data_parallel_ranks

POLICY, CRITIC = plain_class(ppo_actor.PolicyModelActor), plain_class(ppo_critic.CriticModelActor)
REFERENCE = plain_class(launcher.ReferenceModelActor)


class _WholeBatch:
    """A mixin for OpenRLHF's actor and critic trainers, which lets them train on every sample of a batch.

    The last micro-batch of a batch closes its optimizer step. A loss that is not finite stops the run before its
    gradient reaches the weights.
    """

    module: ModuleType  # the module that defines OpenRLHF's trainer

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        backward = self.strategy.backward

        def checked(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not torch.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of {type(self).__name__} is {loss.item()}; its gradient was not applied"
                )
            backward(loss, *args, **kwargs)

        self.strategy.backward = checked

    @extends(ppo_actor.ActorPPOTrainer)
    @extends(ppo_critic.CriticPPOTrainer)
    def ppo_train(self, *args: Any) -> dict[str, float]:
        """Run OpenRLHF's epochs over every sample of the buffer."""
        if not self.args.train.dynamic_batch_enable:
            self.replay_buffer.set_up(self.strategy)
        with rebound(self.module, DataLoader=WholeBatchLoader):
            return super().ppo_train(*args)

    @property
    def _parts_of_a_step(self) -> int:
        """The number of micro-batches of a whole optimizer step on all ranks, as OpenRLHF's normalisers count it."""
        accumulated = 1 if self.args.train.dynamic_batch_enable else self.strategy.accumulated_gradient
        return data_parallel_ranks(self.strategy) * accumulated

    @contextmanager
    def _micro_batch(self, engine: Any, step: int) -> Iterator[MicroBatch]:
        """Tell DeepSpeed, the moving average and the auxiliary loss about micro-batch `step`, counted from 0."""
        part, actor = self.replay_buffer.plan[step], self.args.actor
        engine.set_gradient_accumulation_boundary(part.closes)
        # OpenRLHF averages the weights when its count is a multiple of its gradient accumulation, so set the count.
        self.strategy.time_steps["ema"] = -1 if part.closes else 0
        # DeepSpeed divides the sum over micro-batches and ranks by their number. The weight makes this a sample mean.
        coefficient, weight = actor.aux_loss_coef, part.samples * self._parts_of_a_step / part.step_samples
        actor.aux_loss_coef = coefficient * weight
        try:
            yield part
        finally:
            actor.aux_loss_coef = coefficient


class ParcelActorTrainer(ppo_actor.ActorPPOTrainer):
    """OpenRLHF's actor trainer, which sends its weights in parcels."""

    @extends(ppo_actor.ActorPPOTrainer)
    def broadcast_to_vllm(self) -> None:
        """Make OpenRLHF's weight sync, with many tensors in a message."""
        with in_parcels(self):
            super().broadcast_to_vllm()


class WholeBatchActorTrainer(_WholeBatch, ParcelActorTrainer):
    """OpenRLHF's actor trainer on a batch of any number of micro-batches."""

    module = ppo_actor
    rate_factor = 1.0  # on the learning rate

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if strategy.args.adapt.kl_target == "behaviour":
            # The flag was set to 0 so that OpenRLHF loads no reference model, but the loss needs the coefficient.
            strategy.args.algo.kl.init_coef = strategy.args.checked.kl_coef
        super().__init__(strategy, *args, **kwargs)

    @extends(ppo_actor.ActorPPOTrainer)
    def training_step(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None) -> dict:
        """Make OpenRLHF's step, and count a filler in no metric."""
        with self._micro_batch(self.actor.model, step) as part:
            if part.closes and self.rate_factor != 1:
                self._set_rates(self.rate_factor)
            status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        if part.closes and self.rate_factor != 1:
            self._set_rates(1.0)
        self._count(status, part)
        return status

    def _set_rates(self, factor: float) -> None:
        """Set the optimizer's learning rates to those of the schedule, times the factor."""
        groups = self.actor.model.optimizer.param_groups
        for group, rate in zip(groups, self.actor_scheduler.get_last_lr(), strict=True):
            group["lr"] = factor * rate

    def _count(self, status: dict[str, Any], part: MicroBatch) -> None:
        """Correct OpenRLHF's numbers of a micro-batch.

        OpenRLHF divides the loss of a micro-batch by the tokens (or samples) of an average micro-batch of its optimizer
        step. It assumes that the step has all of its micro-batches. The losses are corrected if there are fewer.
        """
        metrics, weights = status["metrics"], status["weights"]
        if part.samples == 0:
            status["num_samples"] = status["num_action_tokens"] = 0.0
            status["metrics"] = {name: value if weights[name] is None else 0.0 for name, value in metrics.items()}
            return
        losses = ["policy_loss", "entropy_loss"] + ["kl"] * self.args.algo.kl.use_loss
        for name in metrics.keys() & set(losses):
            metrics[name] = metrics[name] * (part.step_parts / self._parts_of_a_step)


class WholeBatchCriticTrainer(_WholeBatch, ppo_critic.CriticPPOTrainer):
    """OpenRLHF's critic trainer on a batch of any number of micro-batches."""

    module = ppo_critic

    @extends(ppo_critic.CriticPPOTrainer)
    def training_step(self, experience: Any, step: int, loss_batch_info: Any = None) -> dict[str, float]:
        """Make OpenRLHF's step, and count a filler in no metric.

        OpenRLHF takes the plain mean of these numbers over micro-batches and ranks. The numbers are weighted here, so
        that this mean becomes a mean over samples: of each micro-batch's mean value and of each optimizer step's mean
        loss.
        """
        with self._micro_batch(self.critic, step) as part:
            status = super().training_step(experience, step, loss_batch_info)
        plan, total = self.replay_buffer.plan, self.replay_buffer.total
        if part.samples == 0:
            return status | {"critic_loss": 0.0, "values": 0.0}
        parts = len(plan) * data_parallel_ranks(self.strategy)
        status["critic_loss"] *= part.step_samples * parts / (total * self._parts_of_a_step)
        status["values"] *= part.samples * parts / total
        return status


class _Worker:
    """A mixin for OpenRLHF's workers, which keeps the port of their process group.

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


class RewardWorker(_Worker, plain_class(launcher.RewardModelActor)):
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

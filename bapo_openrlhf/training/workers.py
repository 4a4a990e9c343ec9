"""Actor and critic workers that train on a batch of any size.

OpenRLHF steps the optimizer when DeepSpeed has counted `train.batch_size` samples. A batch adapted to what is worth
training on is seldom a multiple of that: the rest would stay in the gradient buffers and leak into the next step. Here
the last optimizer step of a batch is taken with what is left. Its loss is normalised over what is really in it, because
OpenRLHF normalises each accumulation window by the tokens it holds. With dynamic batching, where OpenRLHF decides for
each micro-batch whether a step follows it, DeepSpeed is told the same: under ZeRO-1 and 2 it would otherwise keep the
gradient of a step's last micro-batch only.

A rank that has a micro-batch less than another trains on a filler (see `dealing`). A filler adds nothing to a gradient,
to a metric or to the auxiliary loss of a mixture of experts.

Two things that OpenRLHF's actor does not do are added: the loss of responses that another model wrote, and one
optimizer step of fine-tuning on such responses.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ray
import torch
from openrlhf.models import aggregate_loss
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

from bapo_openrlhf.adapt.arithmetic import MicroBatch
from bapo_openrlhf.training.checksums import digests, stacked
from bapo_openrlhf.training.contract import extends, plain_class, rebound
from bapo_openrlhf.training.profiling import Traced
from bapo_openrlhf.training.samples import EXTERNAL
from bapo_openrlhf.training.weight_sync import in_parcels
from bapo_openrlhf.training.whole_batch import WholeBatchLoader, WholeBatchReplayBuffer, data_parallel_ranks

POLICY, CRITIC = plain_class(ppo_actor.PolicyModelActor), plain_class(ppo_critic.CriticModelActor)


class _WholeBatch:
    """Mixed into OpenRLHF's actor and critic trainers.

    Every sample is trained on. The last micro-batch of a batch closes its optimizer step, and a loss that is no finite
    number stops the run before its gradient reaches the weights.
    """

    module: ModuleType  # of OpenRLHF's trainer

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.strategy.backward = self._checked(self.strategy.backward)

    def _checked(self, backward: Callable[..., None]) -> Callable[..., None]:
        def checked(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not torch.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of {type(self).__name__} is {loss.item()}; its gradient was not applied"
                )
            backward(loss, *args, **kwargs)

        return checked

    @extends(ppo_actor.ActorPPOTrainer)
    @extends(ppo_critic.CriticPPOTrainer)
    def ppo_train(self, *args: Any) -> dict[str, float]:
        """OpenRLHF's epochs over the buffer, every sample of it."""
        if not self.args.train.dynamic_batch_enable:
            self.replay_buffer.set_up(self.strategy)
        with rebound(self.module, DataLoader=WholeBatchLoader):
            return super().ppo_train(*args)

    @property
    def _parts_of_a_step(self) -> int:
        """Micro-batches of a whole optimizer step on all ranks, as OpenRLHF's normalisers count them."""
        accumulated = 1 if self.args.train.dynamic_batch_enable else self.strategy.accumulated_gradient
        return data_parallel_ranks(self.strategy) * accumulated

    @contextmanager
    def _micro_batch(self, engine: Any, step: int) -> Iterator[MicroBatch]:
        """Micro-batch `step` (from 0): what DeepSpeed, the moving average and the auxiliary loss must know of it."""
        part, actor = self.replay_buffer.plan[step], self.args.actor
        engine.set_gradient_accumulation_boundary(part.closes)
        # OpenRLHF averages weights at each multiple of its gradient accumulation; the count is made to say the same.
        self.strategy.time_steps["ema"] = -1 if part.closes else 0
        # DeepSpeed divides the sum over micro-batches and ranks by their number: this makes it a mean over samples.
        coefficient, weight = actor.aux_loss_coef, part.samples * self._parts_of_a_step / part.step_samples
        actor.aux_loss_coef = coefficient * weight
        try:
            yield part
        finally:
            actor.aux_loss_coef = coefficient


class WholeBatchActorTrainer(_WholeBatch, ppo_actor.ActorPPOTrainer):
    """OpenRLHF's actor trainer on a batch of any number of micro-batches."""

    module = ppo_actor

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if strategy.args.adapt.kl_target == "behaviour":
            # The reference model is not built when OpenRLHF's coefficient is 0; the loss needs the coefficient back.
            strategy.args.algo.kl.init_coef = strategy.args.checked.kl_coef
        super().__init__(strategy, *args, **kwargs)
        self.plain_loss = self.actor_loss_fn
        self.shaping: float | None = None  # gamma, once a method has traces

    @extends(ppo_actor.ActorPPOTrainer)
    def training_step(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None) -> dict:
        """OpenRLHF's; a filler counts in no metric."""
        marks = experience.info.get(EXTERNAL)
        if marks is not None:
            external = torch.tensor([bool(mark) for mark in marks], device=experience.action_mask.device)
            self.actor_loss_fn = MixedLoss(self.plain_loss, external, self.shaping)
        try:
            with self._micro_batch(self.actor.model, step) as part:
                status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        finally:
            self.actor_loss_fn = self.plain_loss
        self._count(status, part)
        return status

    def _count(self, status: dict[str, Any], part: MicroBatch) -> None:
        """Make OpenRLHF's numbers of a micro-batch those of its samples.

        OpenRLHF divides a micro-batch's loss by the tokens (or samples) of an average micro-batch of its optimizer
        step. It takes the number of micro-batches from a whole step, and this corrects it if there are fewer.
        """
        metrics, weights = status["metrics"], status["weights"]
        if part.samples == 0:
            status["num_samples"] = status["num_action_tokens"] = 0.0
            status["metrics"] = {name: value if weights[name] is None else 0.0 for name, value in metrics.items()}
            return
        losses = ["policy_loss", "entropy_loss"] + ["kl"] * self.args.algo.kl.use_loss
        for name in metrics.keys() & set(losses):
            metrics[name] = metrics[name] * (part.step_parts / self._parts_of_a_step)

    @extends(ppo_actor.ActorPPOTrainer)
    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's weight sync, many tensors in a message."""
        with in_parcels(self):
            super().broadcast_to_vllm()

    def finetune(self, micro_batches: Sequence[Any], tokens: int, ranks: int, weight: float) -> float:
        """One optimizer step on -log pi(token), the mean over the tokens of all ranks' demonstrations, times `weight`.

        Args:
            micro_batches: this rank's samples; every rank has equally many micro-batches.
            tokens: of the responses of all ranks.
            ranks: data-parallel ranks; DeepSpeed divides the sum of their gradients by it.

        Returns:
            This rank's part of the mean.
        """
        self.actor.train()
        engine, device = self.actor.model, torch.cuda.current_device()
        scale = weight * ranks * engine.gradient_accumulation_steps()  # DeepSpeed divides by the last, too
        is_vlm, mean = getattr(self.actor, "is_vlm", False), 0.0
        for number, experience in enumerate(micro_batches, 1):
            engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            experience.to_device(device)
            images = merge_mm_train_inputs(experience.mm_train_inputs, device) if is_vlm else {}
            log_probs = self.actor(
                experience.sequences,
                experience.action_mask,
                attention_mask=experience.attention_mask,
                ring_attn_group=self.strategy.ring_attn_group,
                **images,
            )
            loss = aggregate_loss(-log_probs, experience.action_mask, batch_num_tokens=tokens)
            self.strategy.backward(loss * scale, self.actor, self.actor_optim)
            self.strategy.optimizer_step(self.actor_optim, self.actor, self.actor_scheduler, name="actor")
            mean += loss.item()
        if self.ema_model:
            self.strategy.time_steps["ema"] = -1  # OpenRLHF averages when its count is a multiple; it adds 1 first
            self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")
        return mean


class MixedLoss:
    """OpenRLHF's policy loss on the responses of policies of this run, -f(pi) A on those that another model wrote.

    f is the policy shaping of `adapt.traces.shaped`. Both parts are normalised over all tokens (or samples) of the
    optimizer step, as OpenRLHF does. Its numbers for the log count another model's tokens as unclipped and unmoved.

    Args:
        plain: OpenRLHF's loss.
        external: bool (B,), samples that another model wrote.
        gamma: of the shaping.
    """

    def __init__(self, plain: Any, external: torch.Tensor, gamma: float | None) -> None:
        if gamma is None:
            raise RuntimeError("there are traces in the batch, and the actor was not told how to shape their loss")
        self.plain, self.external, self.gamma = plain, external.unsqueeze(-1), gamma

    def __call__(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        *,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None,
        **batch_info: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        own = action_mask.masked_fill(self.external, 0)
        loss, *numbers = self.plain(
            log_probs, old_log_probs, advantages, action_mask=own, rollout_log_probs=rollout_log_probs, **batch_info
        )
        shaped = torch.sigmoid(log_probs - math.log(self.gamma))  # x / (x + gamma) = 1 / (1 + exp(log gamma - log x))
        other = action_mask.masked_fill(~self.external, 0)
        loss = loss + aggregate_loss(-shaped * advantages, other, self.plain.token_level_loss, **batch_info)
        share = own.sum() / action_mask.sum().clamp(min=1)
        return loss, *(
            None if number is None else torch.where(share > 0, number * share, torch.zeros_like(number))
            for number in numbers
        )


class WholeBatchCriticTrainer(_WholeBatch, ppo_critic.CriticPPOTrainer):
    """OpenRLHF's critic trainer on a batch of any number of micro-batches."""

    module = ppo_critic

    @extends(ppo_critic.CriticPPOTrainer)
    def training_step(self, experience: Any, step: int, loss_batch_info: Any = None) -> dict[str, float]:
        """OpenRLHF's; a filler counts in no metric.

        OpenRLHF takes the plain mean of these numbers over micro-batches and ranks. They are weighted here so that it
        is the mean over the samples: of each micro-batch's mean value, and of each optimizer step's mean loss.
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


def _require_type(built: Any, kind: type) -> None:
    """Raise RuntimeError when OpenRLHF built its own class: gradients would leak from one batch into the next."""
    if not isinstance(built, kind):
        raise RuntimeError(f"OpenRLHF's worker built a {type(built).__name__} and not a {kind.__name__}")


class _OwnPort:
    """Mixed into OpenRLHF's workers: the port of their process group stays theirs from its choice on.

    OpenRLHF chooses a free port, lets it go, and listens on it only after the models' processes have started; whatever
    takes a port meanwhile (an engine, Ray) may take this one. Here the socket that the port was chosen with stays
    bound: the kernel gives the port to nobody who asks for any free one, and torch, which binds with SO_REUSEADDR as
    this socket does, can listen on it.
    """

    @extends(launcher.BaseDistributedActor)
    def _get_free_port(self) -> int:
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("", 0))
        return self._port_holder.getsockname()[1]


class _Resumable:
    """Mixed into OpenRLHF's workers: the random generator that shuffles the samples, for the checkpoint."""

    def rng_state(self) -> list[torch.Tensor]:
        """State of torch's generator on the CPU and, where there is one, on this rank's GPU; uint8."""
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states

    def set_rng_state(self, states: list[torch.Tensor]) -> None:
        """Inverse of `rng_state`."""
        torch.set_rng_state(states[0])
        if len(states) > 1 and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[1])


class _Dealt:
    """Mixed into OpenRLHF's workers that train: what `dealing.shares` sends them."""

    @extends(POLICY)
    @extends(CRITIC)
    def append(self, experience: Any, filler: Any, samples: int) -> None:
        """This rank's share of a batch, see `WholeBatchReplayBuffer.take`."""
        self.trainer.replay_buffer.take(experience, filler, samples)


class PolicyWorker(_Dealt, _Resumable, Traced, _OwnPort, POLICY):
    """OpenRLHF's actor worker on batches of any size."""

    @extends(POLICY)
    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        with rebound(ppo_actor, ActorPPOTrainer=WholeBatchActorTrainer, NaiveReplayBuffer=WholeBatchReplayBuffer):
            super().init_model_from_pretrained(*args, **kwargs)
        _require_type(self.trainer, WholeBatchActorTrainer)
        _require_type(self.trainer.replay_buffer, WholeBatchReplayBuffer)

    def shape_traces(self, gamma: float) -> None:
        """Say how the loss of another model's responses is shaped; before the first batch that has some."""
        self.trainer.shaping = gamma

    def finetune(self, demonstrations: Sequence[Any], tokens: int, ranks: int, weight: float) -> float:
        """One optimizer step on demonstrations, see `WholeBatchActorTrainer.finetune`."""
        return self.trainer.finetune(demonstrations, tokens, ranks, weight)

    def weight_checksums(self) -> dict[str, str]:
        """Digest of each weight tensor under vLLM's name (not with ZeRO-3, where no rank holds whole tensors)."""
        return digests(stacked(dict(self.actor.model.module.named_parameters())).items())


class CriticWorker(_Dealt, _Resumable, Traced, _OwnPort, CRITIC):
    """OpenRLHF's critic worker on batches of any size."""

    @extends(CRITIC)
    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        with rebound(ppo_critic, CriticPPOTrainer=WholeBatchCriticTrainer, NaiveReplayBuffer=WholeBatchReplayBuffer):
            super().init_model_from_pretrained(*args, **kwargs)
        _require_type(self.trainer, WholeBatchCriticTrainer)
        _require_type(self.trainer.replay_buffer, WholeBatchReplayBuffer)


class ReferenceWorker(Traced, _OwnPort, plain_class(launcher.ReferenceModelActor)):
    """OpenRLHF's reference worker."""


class RewardWorker(Traced, _OwnPort, plain_class(launcher.RewardModelActor)):
    """OpenRLHF's reward worker."""


class PlainPolicyWorker(Traced, _OwnPort, POLICY):
    """OpenRLHF's actor worker, for a run without batch adaptation."""


class PlainCriticWorker(Traced, _OwnPort, CRITIC):
    """OpenRLHF's critic worker, for a run without batch adaptation."""


# Decorated under other names, so that Ray's workers import the classes above from this module. A class that its own
# name does not lead to is sent by value, with copies of OpenRLHF's globals, and rebinding a name in OpenRLHF's module
# would not reach it.
AdaptedPolicyActor = ray.remote(num_gpus=1)(PolicyWorker)
AdaptedCriticActor = ray.remote(num_gpus=1)(CriticWorker)
ReferenceActor = ray.remote(num_gpus=1)(ReferenceWorker)
RewardActor = ray.remote(num_gpus=1)(RewardWorker)
PlainPolicyActor = ray.remote(num_gpus=1)(PlainPolicyWorker)
PlainCriticActor = ray.remote(num_gpus=1)(PlainCriticWorker)

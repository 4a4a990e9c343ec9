"""The updates of actor and critic: the loop over the micro-batches of a batch.

OpenRLHF's loop steps the optimizer when DeepSpeed has counted `train.batch_size` samples. The size of an adapted batch
is seldom a multiple of this, so the rest would stay in the gradient buffers and leak into the next step. It also waits
for the GPU several times in each micro-batch, because it reads each metric there. Here the last optimizer step takes
the samples that are left, and all metrics are reduced over the ranks in one call. Models, losses, optimizers and
schedules are OpenRLHF's, and all that its loop reads of the arguments is read here as well.
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from openrlhf.models import aggregate_loss
from openrlhf.models.utils import compute_approx_kl, masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor, ppo_critic
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from tqdm import tqdm

from bapo_openrlhf.adapt.arithmetic import MicroBatch
from bapo_openrlhf.adapt.corrections import ReuseGate
from bapo_openrlhf.flags.sizes import most_tokens
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.wire.failures import OWN
from bapo_openrlhf.training.wire.packing import FIRST_RATIO, demonstration_tokens, is_demonstration
from bapo_openrlhf.training.worker.loss_parts import FirstRatio, after_veto, demonstration_loss, without_demonstrations
from bapo_openrlhf.training.worker.shards import head_energy, optimizer_left_out, part_of
from bapo_openrlhf.training.worker.weight_sync import ParcelActorTrainer
from bapo_openrlhf.training.worker.whole_batch import Step, WholeBatchReplayBuffer, data_parallel_ranks

# What a loss reads of an experience. Everything else stays in the memory of the CPU.
READ = (
    "sequences", "attention_mask", "action_mask", "action_log_probs", "base_action_log_probs", "rollout_log_probs",
    "advantages", "values", "returns",
)  # fmt: skip


class Means:
    """Weighted means of numbers over micro-batches and ranks. Nothing waits for the GPU before `reduced`."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, name: str, value: torch.Tensor | float, weight: float) -> None:
        """Count a number, without dimensions, with a weight. A number with the weight 0 may be nan."""
        number = value.detach().double() if isinstance(value, torch.Tensor) else value
        self._sums[name] = self._sums.get(name, 0.0) + (number * weight if weight else 0.0)
        self._weights[name] = self._weights.get(name, 0.0) + weight

    @property
    def names(self) -> list[str]:
        """Names of the numbers, in order."""
        return sorted(self._sums)

    def reduced(self, device: Any) -> dict[str, float]:
        """The means over all ranks, by name, of what has any weight. All ranks must call this, with the same names."""
        names = self.names
        numbers = [self._sums[name] for name in names] + [self._weights[name] for name in names]
        vector = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
        dist.all_reduce(vector)
        sums, weights = vector.view(2, -1).tolist()
        return {name: total / weight for name, total, weight in zip(names, sums, weights, strict=True) if weight}


class LossContext(NamedTuple):
    """A micro-batch, and what its loss needs to know of the batch.

    Attributes:
        tokens: Generated tokens in it, and those of demonstrations; 0 if it is a filler.
        whole: Micro-batches of a whole optimizer step, on all ranks. DeepSpeed divides the sum of their losses by it.
        normalisers: Arguments of OpenRLHF's losses: tokens and samples of the optimizer step, divided by DeepSpeed's
            gradient accumulation, and the number of ranks.
        demonstration_tokens: Those of demonstrations in it.
        counted: Its equal part of this rank's tokens in the optimizer step, also of those that are skipped.
    """

    plan: MicroBatch
    tokens: float
    whole: int
    normalisers: Mapping[str, Any]
    demonstration_tokens: float = 0.0
    counted: float = 0.0


class _WholeBatch:
    """Lets OpenRLHF's trainers train on every sample. A loss that is not finite never reaches the weights."""

    engine: Any
    scheduler: Any
    use: int  # which use of the batch it is, from 1 on
    tripped: bool  # whether its uses have ended early

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        size, packing = strategy.args.train.micro_batch_size, strategy.args.ds.packing_samples
        self.replay_buffer = WholeBatchReplayBuffer(size, packing_samples=packing)

    @extends(ppo_actor.ActorPPOTrainer)
    @extends(ppo_critic.CriticPPOTrainer)
    def ppo_train(self, *loss_arguments: Any) -> dict[str, float]:
        """Make the epochs of a batch. Returns the metrics, means over micro-batches and ranks.

        Raises:
            FloatingPointError: A loss or a gradient is not finite.
        """
        self.replay_buffer.set_up(self.strategy)
        skipped = self.engine.skipped_steps
        self.means, self._losses, self._norms, self._rates = Means(), 0.0, [], []
        self.use, self.tripped = 0, False
        while self.use < self.max_epochs and not self.tripped:
            self.use += 1
            loader = tqdm(
                self.replay_buffer.loader(self._shuffles, self.dataloader_pin_memory),
                total=len(self.replay_buffer.plan),
                desc=f"Train epoch [{self.use}/{self.max_epochs}]",
                disable=not self.strategy.is_rank_0(),
            )
            for step in self.replay_buffer.steps(loader, self.strategy):
                for experience, part in self._with_normalisers(step):
                    self.train_micro_batch(experience, part, *loss_arguments)
                if self.tripped:
                    break
        metrics = self._metrics()
        self._require_applied(skipped)
        return metrics

    def _require_applied(self, skipped: int) -> None:
        """Raise FloatingPointError if a gradient was not finite. DeepSpeed applies it in some stages of ZeRO."""
        what = f"a gradient of {type(self).__name__} is not finite"
        parameters = (parameter for parameter in self.engine.parameters() if parameter.requires_grad)
        norms = torch.stack([part_of(parameter).norm(dtype=torch.float) for parameter in parameters])
        if not norms.isfinite().all():
            raise FloatingPointError(f"{what}, so the weights are not; those of the last checkpoint are")
        if self.engine.skipped_steps > skipped:
            raise FloatingPointError(f"{what}; it was not applied")

    @property
    def _shuffles(self) -> bool:
        """A plan by tokens depends on the places, and a tensor-parallel group must see the same samples."""
        return most_tokens(self.args, "train") is None and self.args.ds.tensor_parallel_size <= 1

    def _with_normalisers(self, step: Step) -> list[tuple[Experience, LossContext]]:
        """The micro-batches of a step. Losses are divided by tokens and samples of all ranks, also by skipped ones."""
        ranks = data_parallel_ranks(self.strategy)
        accumulated = 1 if self.args.train.dynamic_batch_enable else self.strategy.accumulated_gradient
        tokens = [float(experience.action_mask.sum()) for _, experience in step.parts]
        samples = [float(experience.action_mask.any(-1).sum()) for _, experience in step.parts]
        skipped = float(sum(step.skipped)), float(sum(map(bool, step.skipped)))
        counts = torch.tensor([sum(tokens, skipped[0]), sum(samples, skipped[1])])
        counts = counts.to(torch.cuda.current_device(), non_blocking=True)
        dist.all_reduce(counts, group=self.strategy.ds_device_mesh["dp"].get_group())
        token_count, sample_count = (counts / accumulated).unbind()
        normalisers = {"dp_size": ranks, "batch_num_tokens": token_count, "global_batch_size": sample_count}
        whole, counted = ranks * accumulated, sum(tokens, skipped[0]) / len(tokens)
        return [
            (each, LossContext(plan, count, whole, normalisers, demonstration_tokens(each), counted))
            for count, (plan, each) in zip(tokens, step.parts, strict=True)
        ]

    def train_micro_batch(self, experience: Experience, part: LossContext, *loss_arguments: Any) -> None:
        """Add a micro-batch to the gradient, and step the optimizer if this one closes a step."""
        device = torch.cuda.current_device()
        for name in READ:
            value = getattr(experience, name)
            setattr(experience, name, None if value is None else value.to(device, non_blocking=True))
        self.engine.set_gradient_accumulation_boundary(part.plan.closes)
        loss = self.loss(experience, part, *loss_arguments)
        self.strategy.backward(loss, self.engine, None)
        self._losses = self._losses + loss.detach()
        if part.plan.closes:
            self._require_finite()
        self._step(part.plan)
        self._rates.append(self.scheduler.get_last_lr()[0])
        if part.plan.closes:
            self._norms.append(self.engine.get_global_grad_norm())

    def _step(self, plan: MicroBatch) -> None:
        """The engine's step, which is one of the optimizer only if the micro-batch closes a step."""
        self.strategy.optimizer_step(None, self.engine, None)

    def _require_finite(self) -> None:
        losses, self._losses = self._losses, 0.0
        if not torch.isfinite(losses):
            raise FloatingPointError(
                f"the loss of {type(self).__name__} is {losses.item()}; its gradient was not applied"
            )

    def _balance(self, output: Any, part: LossContext) -> torch.Tensor | float:
        """The auxiliary loss of experts, weighted so that DeepSpeed's sum is a mean over the samples of the step."""
        if not self.aux_loss:
            return 0.0
        weight = part.plan.samples * part.whole / part.plan.step_samples
        return output.aux_loss * (self.args.actor.aux_loss_coef * weight)

    def _metrics(self) -> dict[str, float]:
        raise NotImplementedError


class WholeBatchActorTrainer(_WholeBatch, ParcelActorTrainer):
    """OpenRLHF's actor trainer on a batch of any number of micro-batches."""

    rate_factor = 1.0  # of the optimizer steps to come (`--adapt.scale_learning_rate`)
    cross_entropy = False  # whether the loss is only that of fine-tuning on demonstrations
    first_ratio: FirstRatio | None = None  # looks at the next optimizer step, whose ratio must be 1

    gate = cached_property(lambda self: ReuseGate.of(self.args.adapt))
    engine = property(lambda self: self.actor.model)
    scheduler = property(lambda self: self.actor_scheduler)

    def _require_finite(self) -> None:
        """Raise also if the first ratio of the run is not 1."""
        super()._require_finite()
        if self.first_ratio and not self.cross_entropy:
            first, self.first_ratio = self.first_ratio, None
            self.means.add(FIRST_RATIO, *first.require())

    def _step(self, plan: MicroBatch) -> None:
        """Also ask the gate, which may end the uses of the batch: then the optimizer is left out.

        A factor on the learning rate holds only while the optimizer steps.
        """
        if self.gate is not None and plan.closes and not self.cross_entropy:
            energy = head_energy(self.engine.module)
            self.tripped = self.gate.trips(energy, self.use)
            self.means.add("reuse/head_energy", energy, 1.0)
            self.means.add("reuse/tripped_share", float(self.tripped), 1.0)
        scaled = plan.closes and self.rate_factor != 1
        if scaled:
            self._set_rates(self.rate_factor)
        with optimizer_left_out(self.engine) if self.tripped else nullcontext():
            super()._step(plan)
        if scaled:
            self._set_rates(1.0)
        if plan.closes and self.ema_model and not self.tripped:
            self._average_weights()

    def _set_rates(self, factor: float) -> None:
        groups = self.engine.optimizer.param_groups
        for group, rate in zip(groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = factor * rate

    @torch.no_grad()
    def _average_weights(self) -> None:
        """Make one step of the exponential moving average of the weights. Under ZeRO-3, each rank averages its part."""
        for weight, mean in zip(self.actor.parameters(), self.ema_model.parameters(), strict=True):
            if weight.requires_grad:
                current, average = part_of(weight), part_of(mean)  # the average may be in the host's memory
                average.copy_(torch.lerp(current, average.to(current.device), self.ema_beta))

    def loss(self, experience: Experience, part: LossContext, kl_coef: float) -> torch.Tensor:
        """The actor's loss of a micro-batch (Eq. 1, 3), with the terms for KL, experts and entropy."""
        mask, images = experience.action_mask, {}
        if experience.mm_train_inputs and self.actor.is_vlm:
            images = merge_mm_train_inputs(experience.mm_train_inputs, mask.device)
        entropy_coef = self.args.actor.entropy_coef
        log_probs, output = self.actor(
            experience.sequences,
            mask,
            attention_mask=experience.attention_mask,
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
            return_entropy=entropy_coef is not None,
            **images,
        )
        added_loss: torch.Tensor | float = 0.0
        if part.demonstration_tokens:
            by_token = self.actor_loss_fn.token_level_loss
            added_loss = demonstration_loss(log_probs, experience, part.normalisers, by_token, self.cross_entropy)
            experience = without_demonstrations(experience)
        if self.first_ratio and not self.cross_entropy:
            self.first_ratio.add(log_probs, experience)
        advantages, veto = after_veto(log_probs, experience, self.args.adapt.veto_ratio)
        policy_loss, clip_ratio, policy_kl, engine_kl, filter_ratio = self.actor_loss_fn(
            log_probs,
            experience.action_log_probs,
            advantages,
            action_mask=experience.action_mask,
            rollout_log_probs=experience.rollout_log_probs,
            **part.normalisers,
        )
        loss = policy_loss + added_loss
        losses = {"policy_loss": loss}
        numbers = {"ppo_clip_ratio": clip_ratio, "ppo_kl": policy_kl, **veto}
        if engine_kl is not None:
            if part.demonstration_tokens and self.actor_loss_fn.is_correction_level == "seq":
                # OpenRLHF's ratio is of all samples, and takes a demonstration for a filtered one.
                filter_ratio = 1 - (1 - filter_ratio) / experience.action_mask.any(-1).float().mean()
            numbers |= {"vllm_kl": engine_kl, "is_filter_ratio": filter_ratio}
        if self.args.algo.kl.use_loss:
            losses["kl"], numbers["logprobs_diff"] = self._kl(log_probs, experience, part)
            loss = loss + losses["kl"] * kl_coef
        loss = loss + self._balance(output, part)
        if entropy_coef is not None:
            entropy = output.entropy[:, -mask.shape[1] :]
            losses["entropy_loss"] = aggregate_loss(entropy, mask, **part.normalisers)
            if entropy_coef != 0 and not self.cross_entropy:
                loss = loss - losses["entropy_loss"] * entropy_coef
        self._count(losses, numbers, part)
        return loss

    def _kl(
        self, log_probs: torch.Tensor, experience: Experience, part: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The KL loss, and the mean difference of log-probs to the reference, both in nats."""
        kl = self.args.algo.kl
        if kl.init_coef <= 0:
            return log_probs.new_zeros(()), log_probs.new_zeros(())
        reference = experience.base_action_log_probs
        terms = compute_approx_kl(
            log_probs,
            reference,
            log_probs_old=experience.action_log_probs,
            kl_estimator=kl.estimator,
            unbiased_gradient=kl.unbiased_gradient,
        )
        difference = masked_mean(log_probs.float() - reference.float(), experience.action_mask)
        return aggregate_loss(terms, experience.action_mask, **part.normalisers), difference

    def _count(self, losses: Mapping[str, Any], numbers: Mapping[str, Any], part: LossContext) -> None:
        """Count the numbers of a micro-batch, weighted by its tokens."""
        # OpenRLHF's losses are divided by the tokens of an average micro-batch. Weighted by tokens once more, they are
        # no means over tokens. Those of fine-tuning and of runs that skip samples are means: the policy loss over all
        # tokens, also skipped ones, and the others over the tokens that pass the model.
        is_mean = self.cross_entropy or self.replay_buffer.skips
        for name, value in losses.items():
            tokens, scale = part.tokens, part.plan.step_parts / part.whole
            if is_mean:
                tokens = part.counted if name == "policy_loss" else tokens
                scale = part.normalisers["batch_num_tokens"] / (part.normalisers["dp_size"] * (tokens or 1))
            self.means.add(name, value * scale, tokens)
        for name, value in numbers.items():
            self.means.add(name, value, part.tokens - part.demonstration_tokens)

    def _metrics(self) -> dict[str, float]:
        """OpenRLHF's metrics of the actor. In `extra_logs` nan means no number; a nan of the run itself is shown."""
        names, filler = set(self.means.names), self.replay_buffer.filler
        for sample in (*self.replay_buffer.passed, filler):
            own = sample is not filler and not is_demonstration(sample)
            for name, value in sample_numbers(sample).items():
                if name not in names:
                    self.means.add(name, value, float(own and (name in OWN or not math.isnan(value))))
        metrics = self.means.reduced(torch.cuda.current_device())
        return metrics | {"actor_lr": self._rates[-1], "actor_grad_norm": float(self._norms[-1])}


class WholeBatchCriticTrainer(_WholeBatch, ppo_critic.CriticPPOTrainer):
    """OpenRLHF's critic trainer on a batch of any number of micro-batches."""

    engine = property(lambda self: self.critic)
    scheduler = property(lambda self: self.critic_scheduler)

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.max_epochs *= strategy.args.adapt.critic_epochs

    def loss(self, experience: Experience, part: LossContext) -> torch.Tensor:
        """The critic's loss of a micro-batch (Appendix A.9), with the term for experts."""
        mask, plan = experience.action_mask, part.plan
        values, output = self.critic(
            experience.sequences,
            action_mask=mask,
            attention_mask=experience.attention_mask,
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
        )
        loss = self.critic_loss_fn(values, experience.values, experience.returns, action_mask=mask, **part.normalisers)
        # So weighted, the mean over samples counts the mean loss of each optimizer step once for each of its samples.
        self.means.add("critic_loss", loss * (plan.step_samples / (part.whole * max(plan.samples, 1))), plan.samples)
        self.means.add("values", masked_mean(values, mask), plan.samples if part.tokens else 0)
        return loss + self._balance(output, part)

    def _metrics(self) -> dict[str, float]:
        """The norm is the mean over optimizer steps."""
        norms, rates = list(map(float, self._norms)), self._rates
        metrics = {"critic_lr": sum(rates) / len(rates), "critic_grad_norm": sum(norms) / len(norms)}
        return self.means.reduced(torch.cuda.current_device()) | metrics


def sample_numbers(sample: Experience) -> dict[str, float]:
    """What is logged of a sample, by name: what it knows of its episode, and its `info`."""
    values = {
        field.name: value
        for field in fields(Experience)
        if Experience.is_episode_tensor_field(field.name)
        and field.name not in ("rewards", "scores")
        and (value := getattr(sample, field.name)) is not None
    }
    return {
        name: float(torch.as_tensor(value, dtype=torch.float).mean()) for name, value in (values | sample.info).items()
    }

"""The processes of actor, critic, reference and reward model.

Actor, critic and reference load their models here, so that they have this project's classes without a name of OpenRLHF
being rebound. All that OpenRLHF reads of the arguments is read here, too (tests/unit/training/test_workers.py).
"""

import os
import socket
from collections.abc import Hashable, Sequence
from typing import Any

import ray
import torch
from openrlhf.models import Actor, get_llm_for_sequence_regression
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic
from openrlhf.utils import get_tokenizer

from bapo_openrlhf.adapt.batch import Skipped
from bapo_openrlhf.flags.config import AdaptConfig
from bapo_openrlhf.flags.sizes import critic_steps
from bapo_openrlhf.host import extends, plain_class
from bapo_openrlhf.training.wire.packing import Packed, packed, unpacked
from bapo_openrlhf.training.wire.signals import leave_to_driver
from bapo_openrlhf.training.worker.gradients import probe_gradients
from bapo_openrlhf.training.worker.log_probs import SlicedActor
from bapo_openrlhf.training.worker.loss_parts import FirstRatio
from bapo_openrlhf.training.worker.mended_models import (
    make_savable,
    restore_frequencies,
    restore_normalisation,
    without_noise,
)
from bapo_openrlhf.training.worker.shards import part_of
from bapo_openrlhf.training.worker.updates import WholeBatchActorTrainer, WholeBatchCriticTrainer
from bapo_openrlhf.training.worker.weight_sync import ParcelActorTrainer

AVERAGE = "average"  # among the states that are saved with the actor: the parts of its average that a rank has
POLICY, CRITIC = plain_class(ppo_actor.PolicyModelActor), plain_class(ppo_critic.CriticModelActor)
REFERENCE, REWARD = plain_class(launcher.ReferenceModelActor), plain_class(launcher.RewardModelActor)


class _Worker:
    """Keeps the port of a worker's process group. OpenRLHF releases it, and then an engine or Ray may take it."""

    @extends(launcher.BaseDistributedActor)
    def _get_free_port(self) -> int:
        self._port_holder = socket.socket()  # torch can listen on its port, because torch binds with SO_REUSEADDR, too
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("", 0))
        return self._port_holder.getsockname()[1]

    @extends(launcher.BaseModelActor)
    def _setup_distributed(self, strategy: Any) -> None:
        leave_to_driver()
        super()._setup_distributed(strategy)

    @extends(launcher.BaseModelActor)
    def execute_batch(self, method_name: str, all_data: Any, start_idx: int, end_idx: int) -> list[Any]:
        """Call a method for each item. The answers travel as the inputs did, as arrays or as tensors."""
        if not isinstance(all_data, Packed):
            return super().execute_batch(method_name, all_data, start_idx, end_idx)
        return packed(super().execute_batch(method_name, unpacked(dict(all_data)), start_idx, end_idx))


class _TrainingWorker(_Worker):
    """Takes the shares of `dealing.training_shares`. Checkpoints have the random generator that shuffles samples."""

    def rng_state(self) -> list[torch.Tensor]:
        """States of torch's generators as uint8: of the CPU, and of this rank's GPU if there is one."""
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states

    def set_rng_state(self, states: list[torch.Tensor]) -> None:
        """Restore what `rng_state` returned."""
        torch.set_rng_state(states[0])
        if len(states) > 1 and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[1])

    def seed_rng(self, seed: int) -> None:
        """Seed what `rng_state` returns."""
        torch.manual_seed(seed)

    def take(self, experience: Any, filler: Any, samples: int, skipped: Sequence[Skipped]) -> None:
        """Take this rank's share of a batch, see `WholeBatchReplayBuffer.take`."""
        self.trainer.replay_buffer.take(experience, filler, samples, skipped)


class PlainPolicyWorker(_Worker, POLICY):
    """OpenRLHF's actor worker, which loads its models and builds its trainer in this project's words."""

    trainer_class: type = ParcelActorTrainer

    @extends(POLICY)
    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: Any = None
    ) -> None:
        """Load the actor, its average and its checkpoint. The learning-rate schedule spans so many optimizer steps."""
        args = strategy.args
        self.save_hf_ckpt, self.disable_ds_ckpt = args.ckpt.save_hf, args.ckpt.disable_ds
        self._setup_distributed(strategy)
        actor_class = actor_class_of(args)
        actor = actor_class(
            pretrain,
            **model_arguments(strategy),
            **training_arguments(strategy),
            temperature=args.rollout.temperature,
            use_liger_kernel=args.ds.use_liger_kernel,
            freeze_visual_encoder=args.actor.freeze_visual_encoder,
        )
        quieten(actor, args.adapt)
        strategy.print(actor)
        self.tokenizer = tokenizer_of(pretrain, actor.model, strategy)
        average = None
        if args.train.enable_ema:
            average = actor_class(
                pretrain, **model_arguments(strategy), ds_config=strategy.get_ds_eval_config(offload=True)
            )
            average._offload = True
        checkpoint_gradients(actor, args)
        parts = strategy.prepare((actor, optimizer_of(args.actor, max_steps)))
        self.actor, self.actor_optim, self.actor_scheduler = parts
        self.ema_model = strategy.prepare(average) if average else None
        self.checkpoint_states = load_checkpoint(strategy, self.actor.model, "_actor")
        average_parts = self.checkpoint_states.pop(AVERAGE, None)
        if self.ema_model and self.checkpoint_states:
            restore_average(self.ema_model, average_parts)
        if args.ds.enable_sleep:
            self.offload_states()
        for model in filter(None, (self.actor, self.ema_model)):
            make_savable(model)
            restore_frequencies(model)
        self.trainer = self.trainer_class(
            strategy,
            self.actor,
            ema_model=self.ema_model,
            actor_optim=self.actor_optim,
            actor_scheduler=self.actor_scheduler,
            micro_train_batch_size=args.train.micro_batch_size,
            tokenizer=self.tokenizer,
            ema_beta=args.train.ema_beta,
            vllm_engines=vllm_engines,
        )

    @extends(POLICY)
    def save_checkpoint(
        self, tag: str, client_states: Any = None, metric_value: Any = None, metric_key: Any = None
    ) -> None:
        """Save what OpenRLHF saves, and the average of the weights, which only one rank copies without ZeRO-3."""
        parts = own_parts(self.ema_model) if self.ema_model and self.actor.model.save_non_zero_checkpoint else []
        average = {AVERAGE: [part.to("cpu", copy=True) for part in parts]} if parts else {}
        super().save_checkpoint(tag, (client_states or {}) | average, metric_value, metric_key)


class PlainCriticWorker(_Worker, CRITIC):
    """OpenRLHF's critic worker, which loads its model and builds its trainer in this project's words."""

    trainer_class: type = ppo_critic.CriticPPOTrainer

    @extends(CRITIC)
    def init_model_from_pretrained(self, strategy: Any, pretrain: str, max_steps: int) -> None:
        """Load the critic and its checkpoint, and build the trainer. `max_steps` are optimizer steps of the actor."""
        args = strategy.args
        self.disable_ds_ckpt = args.ckpt.disable_ds
        self._setup_distributed(strategy)
        critic = get_llm_for_sequence_regression(
            pretrain,
            "critic",
            normalize_reward=args.reward.normalize_enable,
            **model_arguments(strategy),
            **training_arguments(strategy),
            value_head_prefix=args.ds.value_head_prefix,
            init_value_head=args.actor.model_name_or_path == args.critic.model_name_or_path,
        )
        restore_normalisation(critic)
        quieten(critic, args.adapt)
        strategy.print(critic)
        strategy.print(f"values are normalized: {args.reward.normalize_enable}, {critic.mean}, {critic.std}")
        # A tokenizer is only saved with the critic's weights.
        self.tokenizer = tokenizer_of(pretrain, critic, strategy) if args.critic.save_value_network else None
        checkpoint_gradients(critic, args)
        optimizer = optimizer_of(args.critic, critic_steps(args, max_steps))
        self.critic, self.critic_optim, self.critic_scheduler = strategy.prepare((critic, optimizer))
        load_checkpoint(strategy, self.critic, "_critic")
        if args.ds.enable_sleep:
            self.offload_states()
        restore_frequencies(self.critic)
        self.trainer = self.trainer_class(
            strategy,
            critic=self.critic,
            critic_optim=self.critic_optim,
            critic_scheduler=self.critic_scheduler,
            micro_train_batch_size=args.train.micro_batch_size,
            value_clip=args.critic.value_clip,
        )


def actor_class_of(args: Any) -> type[Actor]:
    """OpenRLHF's class of actor and reference, or the one that computes log-probs faster."""
    return SlicedActor if args.run.does_faster("log_probs") else Actor


def model_arguments(strategy: Any) -> dict[str, Any]:
    """The arguments of OpenRLHF's constructors of models that are the same for all models."""
    ds = strategy.args.ds
    return {
        "attn_implementation": ds.attn_implementation,
        "experts_implementation": ds.experts_implementation,
        "param_dtype": ds.param_dtype,
        "load_in_4bit": ds.load_in_4bit,
        "packing_samples": ds.packing_samples,
    }


def training_arguments(strategy: Any) -> dict[str, Any]:
    """The arguments of OpenRLHF's constructors of models that only a trained model gets."""
    lora = strategy.args.ds.lora
    adapter = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return adapter | {"target_modules": lora.target_modules, "ds_config": strategy.get_ds_train_config()}


def quieten(model: Any, adapt: AdaptConfig) -> None:
    """Set the dropout of a model that is trained to 0 if batches are adapted, unless the run asks for it."""
    if adapt.enabled and not adapt.keep_dropout:
        without_noise(model)


def optimizer_of(model: Any, steps: int | None) -> dict[str, Any]:
    """The optimizer and the schedule of a model (such as `args.actor`), as `DeepspeedStrategy.prepare` takes them."""
    names = ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
    optimizers = {"muon": vars(model.muon), "adam": vars(model.adam)}
    return {name: getattr(model, name) for name in names} | optimizers | {"scheduler_steps": steps}


def tokenizer_of(pretrain: str, model: Any, strategy: Any) -> Any:
    """The tokenizer of a model, which is saved with it. It also gives the model's config the id of the padding."""
    return get_tokenizer(pretrain, model, "left", strategy, use_fast=not strategy.args.data.disable_fast_tokenizer)


def checkpoint_gradients(model: Any, args: Any) -> None:
    """Let a model compute activations again in the backward pass if the run asks for it. The actor's flag counts."""
    if args.actor.gradient_checkpointing_enable:
        reentrant = {"use_reentrant": args.actor.gradient_checkpointing_reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)


def own_parts(model: Any) -> list[torch.Tensor]:
    """What this rank has of each parameter of a model."""
    return [part_of(parameter) for parameter in model.parameters()]


def restore_average(model: Any, saved: list[torch.Tensor]) -> None:
    """Give the averaged model the weights that `save_checkpoint` saved."""
    for part, average in zip(own_parts(model), saved, strict=True):
        part.copy_(average)


def load_checkpoint(strategy: Any, engine: Any, name: str) -> dict[str, Any]:
    """Load the last checkpoint of a model if the run continues one. Returns the states that were saved with it."""
    args = strategy.args
    folder = os.path.join(args.ckpt.path, name)
    if not (args.ckpt.load_enable and os.path.exists(folder)):
        return {}
    strategy.print(f"Loading the checkpoint: {folder}")
    universal = args.ds.use_universal_ckpt and args.ds.zero_stage == 3
    decays = [group["weight_decay"] for group in engine.basic_optimizer.param_groups] if universal else []
    _, states = strategy.load_ckpt(engine, folder)
    if universal:
        undo_sharing(engine.basic_optimizer, decays)
    return states


def undo_sharing(optimizer: torch.optim.Optimizer, decays: list[float]) -> None:
    """Undo what DeepSpeed shares when it loads a universal checkpoint under ZeRO stage 3.

    All groups of parameters have the settings of the first one, also its weight decay instead of those in `decays`, and
    torch's Adam has one count of steps for all parts of a model, which each part then counts up.
    """
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    for state in optimizer.state.values():
        if isinstance(state["step"], torch.Tensor):
            state["step"] = state["step"].clone()


class PolicyWorker(_TrainingWorker, PlainPolicyWorker):
    """OpenRLHF's actor worker on batches of any size."""

    trainer_class = WholeBatchActorTrainer

    def probe_gradients(self, **parts: Any) -> dict[Hashable, tuple[float, float]]:
        """See `gradients.probe_gradients`."""
        return probe_gradients(self.trainer, **parts)

    def gate_state(self) -> dict[str, Any]:
        """State of the gate on reuse, which the run has."""
        return self.trainer.gate.state_dict()

    def set_gate_state(self, state: dict[str, Any]) -> None:
        """Restore what `gate_state` returned."""
        self.trainer.gate.load_state_dict(state)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the schedule's learning rate by the factor in the optimizer steps that follow."""
        self.trainer.rate_factor = factor

    def expect_first_ratio(self, limit: float | None) -> None:
        """Compare log-probs in the next optimizer step, see `FirstRatio`; not if there is no limit."""
        self.trainer.first_ratio = limit and FirstRatio(limit)

    def fine_tune(self) -> dict[str, float]:
        """Train on the demonstrations that it took with cross-entropy. The learning-rate schedule stays where it is."""
        trainer, engine, sleeps = self.trainer, self.trainer.engine, self.strategy.args.ds.enable_sleep
        if sleeps:
            self.reload_states()
        trainer.cross_entropy, schedule, engine.lr_scheduler = True, engine.lr_scheduler, None
        try:
            status: dict[str, float] = self.fit()
        finally:
            trainer.cross_entropy, engine.lr_scheduler = False, schedule
        if sleeps:
            self.offload_states()
        return status


class CriticWorker(_TrainingWorker, PlainCriticWorker):
    """OpenRLHF's critic worker on batches of any size."""

    trainer_class = WholeBatchCriticTrainer


class ReferenceWorker(_Worker, REFERENCE):
    """OpenRLHF's reference worker."""

    @extends(REFERENCE)
    def init_model_from_pretrained(self, strategy: Any, pretrain: str) -> None:
        """Load the model."""
        args = strategy.args
        self._setup_distributed(strategy)
        model = actor_class_of(args)(
            pretrain,
            **model_arguments(strategy),
            ds_config=strategy.get_ds_eval_config(offload=args.ref.offload),
            temperature=args.rollout.temperature,
            use_liger_kernel=args.ds.use_liger_kernel,
        )
        strategy.print(model)
        if args.ref.offload:
            model._offload = True
        self.model = strategy.prepare(model)
        self.model.eval()
        restore_frequencies(self.model)


class RewardWorker(_Worker, REWARD):
    """OpenRLHF's reward worker."""

    @extends(REWARD)
    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as OpenRLHF does."""
        super().init_model_from_pretrained(*args, **kwargs)
        restore_normalisation(self.model)
        restore_frequencies(self.model)


# The decorated classes have other names, so that Ray's workers import the classes above from this module. If the name
# of a class led to another object, Ray would send the class by value.
AdaptedPolicyActor = ray.remote(num_gpus=1)(PolicyWorker)
AdaptedCriticActor = ray.remote(num_gpus=1)(CriticWorker)
ReferenceActor = ray.remote(num_gpus=1)(ReferenceWorker)
RewardActor = ray.remote(num_gpus=1)(RewardWorker)
PlainPolicyActor = ray.remote(num_gpus=1)(PlainPolicyWorker)
PlainCriticActor = ray.remote(num_gpus=1)(PlainCriticWorker)

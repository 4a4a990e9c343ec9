"""Build a run and train: which processes there are, on which GPUs, and in which order they load.

This takes the place of OpenRLHF's `train` and `create_vllm_engines`, and reads all that these read of the arguments
(tests/unit/training/test_build.py compares the calls). Three things are different:

- A run that pulls towards the behaviour policy (`--adapt.kl_target behaviour`) has no reference model.
- Ray is asked for all processes at once, so that they import the stack and read data while the engines load and
  compile. OpenRLHF first waits for engines that sleep.
- Models on the GPUs of engines take no memory before the engines have their cache, because vLLM stops if free memory
  grows while it measures.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray
from openrlhf.trainer import ppo_trainer_async
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.utils import get_bundle_indices
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import AutoProcessor

from bapo_openrlhf import machine
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.flags.paths import run_folder
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.host import require_version
from bapo_openrlhf.record.run_record import HIDDEN, SECRETS, WARNINGS, append_rows
from bapo_openrlhf.training.driver import waiting
from bapo_openrlhf.training.driver.own_ray import connect
from bapo_openrlhf.training.driver.signals import Signals
from bapo_openrlhf.training.engine import engines
from bapo_openrlhf.training.trainer import dealing, plain_trainer, trainer
from bapo_openrlhf.training.worker import workers
from bapo_openrlhf.training.worker.strategy import strategy_of

SHARE = 0.2  # of a GPU, in Ray's bookkeeping: five processes may be on it


class Classes(NamedTuple):
    """The classes that depend on the arguments of a run: Ray's actors, and what calls all processes of a model."""

    policy: Any
    critic: Any
    trainer: Any
    group: Any


def classes_of(args: SimpleNamespace) -> Classes:
    """Those that adapt batches, or those that compute what OpenRLHF always computes."""
    if args.adapt.enabled:
        models = (workers.AdaptedPolicyActor, workers.AdaptedCriticActor)
        return Classes(*models, trainer.AdaptedPPOTrainerActor, dealing.DealtActorGroup)
    is_async = args.train.async_enable
    trainer_class = ppo_trainer_async.PPOTrainerAsync if is_async else plain_trainer.RecordedPPOTrainerActor
    return Classes(workers.PlainPolicyActor, workers.PlainCriticActor, trainer_class, RayActorGroup)


class RunProcesses:
    """The processes of a run. The constructor asks Ray for all of them, and waits for no model.

    `actor`, `critic`, `reference` and `reward` are None if the run has no such model.
    """

    def __init__(self, args: SimpleNamespace, signals: Signals) -> None:
        self.signals, self.args, self.strategy, self._classes = signals, args, strategy_of(args), classes_of(args)
        classes, train, flags = self._classes, args.train, flags_of(args)
        self.strategy.print(flags | {name: HIDDEN for name in SECRETS if flags[name]})  # train.log may keep it
        beside_actor = placement_of(args.actor) if train.colocate_actor_ref or train.colocate_all else None
        self._shared = train.colocate_all and not train.async_enable  # whether engines are on the actor's GPUs
        self.engines = engines_on(args, beside_actor if self._shared else None)
        self.actor = self._workers(classes.policy, args.actor, beside_actor)
        reference = "ref" in Flags.of(args).loaded
        self.reference = self._workers(workers.ReferenceActor, args.ref, beside_actor) if reference else None
        self._beside_critic = beside_actor if train.colocate_all else None
        critic = args.critic.model_name_or_path
        if critic and train.colocate_critic_reward:
            self._beside_critic = placement_of(args.critic)
        self.critic = self._workers(classes.critic, args.critic, self._beside_critic) if critic else None
        computed = args.reward.remote_url  # by a function, an agent or a server
        self.reward = None if computed else self._workers(workers.RewardActor, args.reward, self._beside_critic)
        stops = args.adapt.enabled or not train.async_enable  # it is this project's
        kind = classes.trainer.options(max_concurrency=2) if stops else classes.trainer  # it answers while it trains
        self.trainer = kind.remote(
            args.actor.model_name_or_path,
            self.strategy,
            self.actor,
            self.critic,
            self.reward,
            self.reference,
            self.engines,
            do_sample=True,
            max_len=args.data.max_len,
            max_new_tokens=args.rollout.max_new_tokens,
            temperature=args.rollout.temperature,
            top_p=args.rollout.top_p,
        )
        self._waiting = waiting.Waiting(
            args.run, signals=signals, trainer=self.trainer if stops else None, processes=self._named(), warn=self._warn
        )

    def _named(self) -> dict[str, Any]:
        """All processes of the run, by names that a user understands."""
        models = {"actor": self.actor, "critic": self.critic, "reference": self.reference, "reward model": self.reward}
        ranks = {
            f"{name} rank {rank}": process
            for name, group in models.items()
            if group is not None
            for rank, process in enumerate(group._actor_handlers)
        }
        engines = {f"{waiting.ENGINE} {number}": engine for number, engine in enumerate(self.engines)}
        return {"trainer": self.trainer, **ranks, **engines}

    def _warn(self, step: int, text: str) -> None:
        """Say a warning, and write it down for the progress bar and for `watch`."""
        print(f"warning: {text}", file=sys.stderr, flush=True)
        append_rows(run_folder(self.args), WARNINGS, step, [{"kind": "stalled", "text": text}])

    def _workers(self, kind: Any, model: SimpleNamespace, place: Any) -> Any:
        """The processes of a model, on the GPUs of a place that it shares with others, or on GPUs of its own."""
        gpus, copies = SHARE if place else 1, self.args.ds.tensor_parallel_size
        sizes = (model.num_nodes, model.num_gpus_per_node)
        return self._classes.group(*sizes, kind, pg=place, num_gpus_per_actor=gpus, duplicate_actors=copies)

    def load(self) -> None:
        """Load all models. Engines on the same GPUs have their cache first."""
        args, steps = self.args, ray.get(self.trainer.get_max_steps.remote())
        if args.vllm.enable_sleep:
            batch_vllm_engine_call(self.engines, "sleep")
        elif self._shared:
            batch_vllm_engine_call(self.engines, "get_num_unfinished_requests")  # answered once an engine is there
        policy = (self.strategy, args.actor.model_name_or_path)
        loading = self.actor.async_init_model_from_pretrained(*policy, steps, self.engines)
        if self.reference is not None:
            loading += self.reference.async_init_model_from_pretrained(*policy)
        if self.reward is not None and args.reward.model_name_or_path:
            loading += self.reward.async_init_model_from_pretrained(self.strategy, args.reward.model_name_or_path)
        if self._beside_critic is not None:
            self._waiting.get(loading, waiting.LOADING)  # a model needs more memory while it loads than afterwards
        if self.critic is not None:
            critic = args.critic.model_name_or_path
            loading += self.critic.async_init_model_from_pretrained(self.strategy, critic, steps)
        self._waiting.get(loading, waiting.LOADING)

    def train(self) -> None:
        """Train, and save the trained models.

        Raises:
            Ended: A signal stopped the run, or it stalled.
        """
        self._waiting.note_homes()
        self.signals.waits = True
        [stopped] = self._waiting.get([self.trainer.fit.remote()])
        if stopped is not None:
            raise self.signals.ended(f"after step {stopped}")
        saving = "saving the trained models"
        self._waiting.get(self.actor.async_save_model(), saving)
        if self.critic is not None and self.args.critic.save_value_network:
            self._waiting.get(self.critic.async_save_model(), saving)


def train(args: SimpleNamespace, signals: Signals) -> None:
    """Build a run, load its models, train and save. The arguments are those of `Run`."""
    require_version()
    if not ray.is_initialized():
        defaults = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
        env = {name: os.environ.get(name, value) for name, value in defaults.items()}
        connect(runtime_env={"env_vars": env, **machine.of_workers()})
    signals.listen()
    run = RunProcesses(args, signals)
    run.load()
    run.train()


def placement(gpus: int) -> Any:
    """Ray's placement group of so many GPUs, as near to each other as possible."""
    place = placement_group([{"GPU": 1, "CPU": 1} for _ in range(gpus)], strategy="PACK")
    ray.get(place.ready())
    return place


def placement_of(model: SimpleNamespace) -> Any:
    """A place with the GPUs of a model."""
    return placement(model.num_nodes * model.num_gpus_per_node)


def engines_on(args: SimpleNamespace, place: Any) -> list[Any]:
    """The rollout engines, on GPUs that they share with the actor, or on GPUs of their own. Nothing waits for them."""
    count, size, share = args.vllm.num_engines, args.vllm.tensor_parallel_size, SHARE if place else 1
    settings = settings_of_engines(args) | {"num_gpus": share}
    place, gpus = place or placement(count * size), 0 if size > 1 else share  # several workers ask for their own GPUs
    created = []
    for number in range(count):
        bundles = get_bundle_indices(place, number, size) if size > 1 else None
        bundle = bundles[0] if bundles else number
        strategy = PlacementGroupSchedulingStrategy(place, bundle, True)  # also for its workers
        process = engines.RolloutActor.options(num_cpus=gpus, num_gpus=gpus, scheduling_strategy=strategy)
        created.append(process.remote(**settings, bundle_indices=bundles, seed=args.train.seed + number))
    return created


def settings_of_engines(args: SimpleNamespace) -> dict[str, Any]:
    """What `RolloutEngine` and vLLM are given, as far as it is the same for all engines."""
    vllm, size, model = args.vllm, args.vllm.tensor_parallel_size, args.actor.model_name_or_path
    settings = {
        "model": model,
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "max_model_len": args.data.max_len,
        "tensor_parallel_size": size,
        **machine.engine_settings(size, full_determinism=args.train.full_determinism_enable),
        "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        "enforce_eager": vllm.enforce_eager,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enable_sleep_mode": vllm.enable_sleep,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "full_determinism": args.train.full_determinism_enable,
        "faster": args.run.does_faster("requests"),
        "agent_func_path": args.train.agent_func_path,
        "remote_rm_url": args.reward.remote_url,
        "mm_pad_token_ids": set(),
    }
    # Log-probs are of the distribution that is sampled from: after temperature, top-p and top-k. Batch adaptation needs
    # those of the behaviour policy alpha in Eq. 3 and 4, and OpenRLHF's importance-sampling correction needs them, too.
    if args.adapt.enabled or args.algo.advantage.is_correction_level != "off":
        settings |= {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
    images = args.data.max_images_per_prompt
    if images > 0:
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=True)
        tokens = {getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video")}
        settings |= {"limit_mm_per_prompt": {"image": images}, "mm_pad_token_ids": tokens - {None}}
    return settings

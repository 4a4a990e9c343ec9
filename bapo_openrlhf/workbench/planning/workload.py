"""The flags that a plan needs, and how the roles of a run share its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

from bapo_openrlhf.adapt.schedule import RolloutSchedule
from bapo_openrlhf.adapt.thresholds import Interval


@dataclass(frozen=True)
class Algorithm:
    """What a plan must know about an algorithm.

    Attributes:
        name: Name in tables.
        adapted: Whether batch adaptation builds batches from X1, X2, X3, with a weight sync every v steps.
        critic: Whether a critic is trained in addition to the actor.
        dynamic: Whether a group without signal is replaced by another one (DAPO).
        reference: Whether a KL penalty to the reference model is possible. DAPO has none.
    """

    name: str
    adapted: bool = False
    critic: bool = False
    dynamic: bool = False
    reference: bool = True

    @property
    def trained(self) -> list[str]:
        """The models that are trained."""
        return ["actor", *["critic"] * self.critic]


ALGORITHMS = (
    Algorithm("GRPO"),
    Algorithm("PPO", critic=True),
    Algorithm("DAPO", dynamic=True, reference=False),
    Algorithm("BAPO-GRPO", adapted=True),
    Algorithm("BA-PPO", adapted=True, critic=True),
)


@dataclass(frozen=True)
class Workload:
    """The flags of a run that a plan needs.

    Attributes:
        prompts: Prompts of a rollout batch.
        capacity: B, the most groups of a training batch.
        train_samples: Samples of an optimizer step.
        hard_capacity, replay_capacity: Prompts and groups that the two buffers hold.
        delay, reevaluate_every: v and m.
        response_tokens, prompt_tokens: Tokens of the longest response and of the longest prompt.
        colocated: Whether all roles share all GPUs and take turns.
        gpus: Number of GPUs of each role in the configuration. The role `engines` is vLLM.
        copies: Number of GPUs that hold one data-parallel rank (tensor parallel x ring attention).
        engine_share: Share of a GPU's memory that an engine takes.
        overlapped: Whether ranks exchange data while they compute.
        engine_sleeps, training_sleeps: Whether memory is given back between their phases.
    """

    group_size: int
    prompts: int
    capacity: int
    train_samples: int
    micro_train: int
    micro_forward: int
    filter: str
    uniform_fraction: float
    gaussian: tuple[float, float]
    c1: Fraction
    c2: Interval
    c3: Interval
    direction: str
    hard_capacity: int
    replay_capacity: int
    replay_steps: int
    delay: int
    reevaluate_every: int
    max_reevaluated: int
    evaluate_every: int
    response_tokens: int
    prompt_tokens: int
    reference: bool
    colocated: bool
    gpus: Mapping[str, int]
    copies: int
    tensor_parallel: int
    engine_share: float
    engine_sleeps: bool
    training_sleeps: bool
    zero_stage: int
    overlapped: bool
    checkpointing: bool
    optimizer_on_host: bool
    reference_on_host: bool
    epochs: int

    @property
    def sample_tokens(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_tokens + self.response_tokens

    def schedule(self, algorithm: Algorithm) -> RolloutSchedule:
        """The schedule of an algorithm. Without batch adaptation it syncs at every step."""
        if not algorithm.adapted:
            return RolloutSchedule(1, 0, self.evaluate_every)
        return RolloutSchedule(self.delay, self.reevaluate_every, self.evaluate_every)

    def has_reference(self, algorithm: Algorithm) -> bool:
        """Whether a reference model is loaded."""
        return self.reference and algorithm.reference

    def passed_forward(self, algorithm: Algorithm) -> list[str]:
        """The models that a batch passes through before training."""
        return [*algorithm.trained, *["reference"] * self.has_reference(algorithm)]

    def roles(self, algorithm: Algorithm) -> dict[str, int]:
        """Number of GPUs in the configuration of each role that an algorithm has."""
        has = {"critic": algorithm.critic, "reference": self.has_reference(algorithm)}
        return {role: count for role, count in self.gpus.items() if has.get(role, True)}

    def gpus_of(self, role: str, algorithm: Algorithm, total: int) -> int:
        """Number of GPUs of a role out of `total`.

        It is `total` if all roles share them. Otherwise roles share in the proportion of the configuration. It is at
        least 1, so that a plan for fewer GPUs than roles can say so instead of dividing by zero.
        """
        if self.colocated:
            return total
        roles = self.roles(algorithm)
        own = roles.get(role, roles["actor"])  # A reference model that shares the actor's GPUs has no own ones.
        return max(total * own // sum(roles.values()), 1)

    def ranks(self, role: str, algorithm: Algorithm, total: int) -> int:
        """Number of data-parallel ranks of a model that is trained or passed forward."""
        return max(self.gpus_of(role, algorithm, total) // self.copies, 1)


def workload_of(args: SimpleNamespace) -> Workload:
    """The workload of parsed arguments. Their own algorithm does not matter because a plan compares algorithms."""
    adapt = args.adapt
    adapt.check() if adapt.enabled else adapt.thresholds()
    c1, c2, c3 = adapt.thresholds()
    response = args.rollout.max_new_tokens or args.data.max_len
    tensor_parallel = max(args.vllm.tensor_parallel_size, 1)
    critic = args.critic if args.critic.model_name_or_path else args.actor
    gpus = {role: m.num_nodes * m.num_gpus_per_node for role, m in (("actor", args.actor), ("critic", critic))}
    if not args.train.colocate_actor_ref:
        gpus["reference"] = args.ref.num_nodes * args.ref.num_gpus_per_node
    gpus["engines"] = max(args.vllm.num_engines or 1, 1) * tensor_parallel
    behaviour = adapt.enabled and adapt.kl_target == "behaviour"
    return Workload(
        group_size=args.rollout.n_samples_per_prompt,
        prompts=args.rollout.batch_size,
        capacity=adapt.batch_size or args.rollout.batch_size,
        train_samples=args.train.batch_size,
        micro_train=args.train.micro_batch_size,
        micro_forward=args.rollout.micro_batch_size,
        filter=adapt.filter,
        uniform_fraction=adapt.uniform_fraction,
        gaussian=(adapt.gaussian_mean, adapt.gaussian_std),
        c1=c1,
        c2=c2,
        c3=c3,
        direction=adapt.threshold_direction,
        hard_capacity=adapt.buffer_size,
        replay_capacity=adapt.replay_buffer_size or adapt.buffer_size,
        replay_steps=adapt.replay_steps,
        delay=adapt.rollout_delay,
        reevaluate_every=adapt.reevaluate_every,
        max_reevaluated=adapt.max_reevaluated_prompts,
        evaluate_every=max(args.eval.steps, 0) if args.eval.dataset else 0,
        response_tokens=response,
        prompt_tokens=max(args.data.max_len - response, 1),
        reference=args.algo.kl.init_coef > 0 and not behaviour,
        colocated=args.train.colocate_all,
        gpus=gpus,
        copies=args.ds.ring_attn_size * args.ds.tensor_parallel_size,
        tensor_parallel=tensor_parallel,
        engine_share=args.vllm.gpu_memory_utilization,
        engine_sleeps=args.vllm.enable_sleep and args.train.colocate_all,
        training_sleeps=args.ds.enable_sleep and args.train.colocate_all,
        zero_stage=args.ds.zero_stage,
        overlapped=args.ds.overlap_comm,
        checkpointing=args.actor.gradient_checkpointing_enable,
        optimizer_on_host=args.ds.adam_offload,
        reference_on_host=args.ref.offload,
        epochs=args.train.max_epochs,
    )

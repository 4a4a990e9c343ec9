"""Bytes on a GPU, in the memory of a machine and on the disk, and one word that says what does not fit."""

import math
from dataclasses import dataclass

from bapo_openrlhf.flags.rules import FLOAT32
from bapo_openrlhf.workbench.planning.constants import GIB, Constants
from bapo_openrlhf.workbench.planning.shapes import BYTES, ModelShape
from bapo_openrlhf.workbench.planning.workload import Algorithm, Workload

OPTIMIZER = 12  # Bytes per parameter: master weight and Adam's two moments in fp32 (arXiv 1910.02054, Sec. 3.1).
TOKEN = LOG_PROB = 4  # Bytes of a stored id and of a stored log-prob (adapt/group.py).
PHASES = ("generation", "experience", "training")
REASONS = {
    "GPUs": "there are fewer GPUs than roles, or than one engine or rank needs",
    "engine": "an engine's weights and the cache of one longest sequence do not fit, even with 8 GPUs per engine",
    "training": "weights, gradients, optimizer and activations of a trained model do not fit",
    "together": "each model fits, but not together with what else stays on the GPU",
    "batch": "an optimizer step (train.batch_size) has fewer samples than ranks x micro-batch",
}


def model_state_bytes(
    parameters: int, zero_stage: int, ranks: int, *, adapter: int = 0, optimizer_on_host: bool = False,
    gradient: int = BYTES,
) -> float:  # fmt: skip
    """Bytes of a trained model's weights, gradients and optimizer on one GPU (arXiv 1910.02054).

    Stage 1 shares the optimizer, 2 also the gradients, 3 also the weights. With LoRA only the `adapter` learns. A
    `gradient` has so many bytes.
    """
    learning = adapter or parameters
    weights = BYTES * (parameters + adapter) / (ranks if zero_stage == 3 else 1)
    gradients = gradient * learning / (ranks if zero_stage >= 2 else 1)
    optimizer = 0.0 if optimizer_on_host else OPTIMIZER * learning / (ranks if zero_stage >= 1 else 1)
    return weights + gradients + optimizer


def activation_bytes(shape: ModelShape, workload: Workload, constants: Constants, *, logits: bool) -> float:
    """Bytes that a GPU keeps for the backward pass of the longest samples; with checkpointing, inputs and one layer."""
    samples = workload.micro_samples("train")
    tokens = samples * workload.sample_tokens / workload.copies
    layer = shape.activation_bytes(workload.masked_tokens)
    inputs = BYTES * shape.hidden
    recomputes = workload.args.actor.gradient_checkpointing_enable
    per_token = inputs * shape.layers + layer if recomputes else layer * shape.layers
    return tokens * per_token + logit_bytes(shape, workload, constants, samples if logits else 0)


def logit_bytes(shape: ModelShape, workload: Workload, constants: Constants, samples: float) -> float:
    """Bytes of the logits of a micro-batch of so many of the longest samples, on one GPU.

    The output head holds one block of the responses' logits at a time, and one tile of this block in fp32. Tensor
    parallelism cuts a head that is not tied to the embeddings. Then OpenRLHF holds the logits of all tokens.
    """
    if workload.args.ds.tensor_parallel_size > 1 and not shape.tied:
        tokens = samples * workload.sample_tokens / workload.copies
        return tokens * constants.cut_logit_bytes * shape.vocabulary
    logits = samples * workload.response_tokens * shape.vocabulary
    return BYTES * min(logits, constants.logit_block) + 2 * 4 * min(logits, constants.logit_tile)


def cache_tokens(shape: ModelShape, workload: Workload, constants: Constants, tensor_parallel: int) -> float:
    """Number of tokens whose keys and values fit into an engine. It is negative if the engine's weights do not fit."""
    share = workload.args.vllm.gpu_memory_utilization * constants.gpu_bytes - constants.engine_reserve_bytes
    return (tensor_parallel * share - shape.weight_bytes) / shape.cache_bytes


def tensor_parallel(shape: ModelShape, workload: Workload, constants: Constants) -> int | None:
    """Number of GPUs of an engine: the configured one, doubled until one longest sequence fits. None: none does."""
    size = workload.args.vllm.tensor_parallel_size
    while cache_tokens(shape, workload, constants, size) < workload.sample_tokens:
        size *= 2
        if size > constants.gpus_per_machine:
            return None
    return size


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU by phase. `word` is "fits" or a key of REASONS."""

    generation: float
    experience: float
    training: float
    engine_gpus: int | None  # None if no engine is large enough
    word: str

    @property
    def gib(self) -> float:
        """GiB of the tightest phase."""
        return max(getattr(self, phase) for phase in PHASES) / GIB


def gpu_memory(shape: ModelShape, workload: Workload, constants: Constants, algorithm: Algorithm, total: int) -> Memory:
    """Memory if `total` GPUs are shared as the workload says. Critic and reward model have the actor's shape.

    While others work, a colocated model that sleeps keeps its 16-bit weights on the GPU, and a sleeping engine nothing.
    """
    args, size = workload.args, tensor_parallel(shape, workload, constants)
    gradient = 4 if args.ds.grad_accum_dtype in FLOAT32 else BYTES  # while those of several micro-batches are added up
    adapter = shape.adapter_parameters(args.ds.lora.rank, args.ds.lora.target_modules)
    parameters = shape.parameters_on(workload.copies)

    def state(role: str) -> float:
        return model_state_bytes(
            parameters, args.ds.zero_stage, workload.ranks(role, algorithm, total), adapter=adapter,
            optimizer_on_host=args.ds.adam_offload, gradient=gradient,
        )  # fmt: skip

    def weights(role: str) -> float:
        whole = BYTES * (parameters + (adapter if role in algorithm.trained else 0))
        return whole / (workload.ranks(role, algorithm, total) if args.ds.zero_stage == 3 else 1)

    engine = args.vllm.gpu_memory_utilization * constants.gpu_bytes
    to_host = args.ds.zero_stage == 3  # DeepSpeed moves a model that is not trained only in this stage
    resident = {"reference": not (args.ref.offload and to_host), "reward": not (args.reward.offload and to_host)}
    sleeps = args.train.colocate_all and args.ds.enable_sleep
    trained = algorithm.trained
    activations = {model: activation_bytes(shape, workload, constants, logits=model == "actor") for model in trained}
    logits = logit_bytes(shape, workload, constants, workload.micro_samples("rollout"))
    blocks = workload.blocks(algorithm)
    generation = experience = training = 0.0
    for _, roles in blocks.values():
        idle = {model: weights(model) if sleeps else state(model) for model in trained if model in roles}
        frozen = sum(weights(model) for model in resident if resident[model] and model in roles)
        if "actor" in roles and args.train.enable_ema and not to_host:
            frozen += BYTES * parameters  # the average of the actor's weights
        resident_bytes = frozen + (engine if "engines" in roles and not args.vllm.enable_sleep else 0.0)
        if "engines" in roles:
            generation = engine + sum(idle.values()) + frozen
        forward = logits if {"actor", "reference"} & set(roles) else 0.0
        experience = max(experience, forward + sum(idle.values()) + resident_bytes)
        for model in idle:
            others = sum(size for other, size in idle.items() if other != model)
            training = max(training, state(model) + activations[model] + others + resident_bytes)
    largest = max(state(model) + activations[model] for model in trained)
    engines, actors = (workload.gpus_of(role, algorithm, total) for role in ("engines", "actor"))
    usable = constants.gpu_bytes - constants.reserve_bytes
    reasons = {
        "engine": size is None,
        "GPUs": total < len(blocks) or engines < (size or 0) or actors < workload.copies,
        "training": largest > usable,
        "together": max(generation, experience, training) > usable,
        # DeepSpeed requires that each rank has a micro-batch in each optimizer step.
        "batch": args.train.batch_size < workload.most_ranks(algorithm, total) * args.train.micro_batch_size,
    }
    word = next((reason for reason, holds in reasons.items() if holds), "fits")
    return Memory(generation, experience, training, size, word)


# ── outside the GPUs ──


@dataclass(frozen=True)
class Host:
    """What a run keeps outside its GPUs, in bytes."""

    engines: float  # the engines' weights while they sleep, in all machines together
    delayed: float  # delayed rollout weights, if something is generated with today's between two syncs
    optimizers: float  # the optimizers' states while the models sleep, or always with `--ds.adam_offload`
    machines: int  # number of machines, which have equal parts of these three
    object_store: float  # that Ray may take on each machine for what its processes hand to one another
    checkpoint: float  # on the disk, one checkpoint of all trained models

    @property
    def machine(self) -> float:
        """Bytes of memory that each machine needs, without those of the processes' own code and data."""
        return (self.engines + self.delayed + self.optimizers) / self.machines + self.object_store


def host_memory(shape: ModelShape, workload: Workload, constants: Constants, algorithm: Algorithm, total: int) -> Host:
    """What a run on `total` GPUs keeps outside them. A critic has the actor's shape. Engines sleep on level 1."""
    args, models = workload.args, len(algorithm.trained)
    size = tensor_parallel(shape, workload, constants) or constants.gpus_per_machine
    weights = shape.weight_bytes * max(workload.gpus_of("engines", algorithm, total) // size, 1)
    periods = [args.adapt.reevaluate_every, args.run.gradient_probe, args.eval.steps if args.eval.dataset else 0]
    between = algorithm.adapted and any(every > 0 and every % args.adapt.rollout_delay for every in periods)
    states = OPTIMIZER * (shape.adapter_parameters(args.ds.lora.rank, args.ds.lora.target_modules) or shape.parameters)
    engines = weights if args.vllm.enable_sleep else 0.0
    delayed = weights if between else 0.0
    on_host = args.ds.adam_offload or (args.train.colocate_all and args.ds.enable_sleep)
    optimizers = models * states if on_host else 0.0
    machines, share = math.ceil(total / constants.gpus_per_machine), constants.object_store_share
    # Ray's store is a share of the machine's memory, so it grows with what the machine must hold.
    store = min((engines + delayed + optimizers) / machines * share / (1 - share), constants.object_store_most_bytes)
    return Host(engines, delayed, optimizers, machines, store, models * (shape.weight_bytes + states))


def replay_bytes(workload: Workload, prompt: float, response: float, groups: float) -> float:
    """Bytes of so many groups on the host: an id for each token, and for a response's also one or two log-probs."""
    stored = TOKEN * (prompt + response) + LOG_PROB * (1 + workload.reference) * response
    return groups * workload.args.rollout.n_samples_per_prompt * stored

"""Bytes on a GPU and on the host, and the one word for what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.groups import keeps_delayed_weights
from bapo_openrlhf.workbench.planning.settings import Method, Settings
from bapo_openrlhf.workbench.planning.shapes import BYTES, ModelShape
from bapo_openrlhf.workbench.planning.times import lengths

OPTIMIZER = 12  # bytes a parameter: master weight and Adam's two moments in fp32 (arXiv 1910.02054, Sec. 3.1)
LOG_PROB = 4  # bytes of a stored log-prob (adapt/group.py)
REASONS = {
    "fits": "fits",
    "GPUs": "fewer GPUs than roles, or than one engine or rank takes",
    "engine": "an engine's weights and the cache of one longest sequence do not fit, with up to 8 GPUs an engine",
    "training": "weights, gradients, optimizer and activations of a trained model do not fit",
    "together": "each fits alone, but not what stays on the GPU beside it",
    "batch": "an optimizer step (train.batch_size) has fewer samples than ranks x micro-batch",
}


def model_state_bytes(parameters: int, zero_stage: int, ranks: int, *, optimizer_on_host: bool = False) -> float:
    """Weights, gradients and optimizer of a trained model on one GPU (arXiv 1910.02054).

    Args:
        zero_stage: 0 shares nothing, 1 the optimizer, 2 gradients too, 3 weights too.
        ranks: data-parallel ranks that share.
    """
    weights = BYTES * parameters / (ranks if zero_stage == 3 else 1)
    gradients = BYTES * parameters / (ranks if zero_stage >= 2 else 1)
    optimizer = 0.0 if optimizer_on_host else OPTIMIZER * parameters / (ranks if zero_stage >= 1 else 1)
    return weights + gradients + optimizer


def activation_bytes(shape: ModelShape, settings: Settings, constants: Constants, *, logits: bool) -> float:
    """Kept for the backward pass of one micro-batch of the longest samples, on one rank's GPU.

    A layer keeps `activation_factor` bytes a token and hidden unit; with checkpointing its input alone, and one layer
    at a time is whole.
    """
    tokens = settings.micro_train * settings.sample_tokens / settings.copies
    layer = constants.activation_factor * shape.hidden
    kept = BYTES * shape.hidden * shape.layers + layer if settings.checkpointing else layer * shape.layers
    return tokens * (kept + (constants.logit_bytes * shape.vocabulary if logits else 0.0))


def forward_bytes(shape: ModelShape, settings: Settings, constants: Constants) -> float:
    """Logits of one forward-pass batch of the longest samples."""
    tokens = settings.micro_forward * settings.sample_tokens / settings.copies
    return tokens * constants.forward_logit_bytes * shape.vocabulary


def cache_tokens(shape: ModelShape, settings: Settings, constants: Constants, tensor_parallel: int) -> float:
    """Tokens whose keys and values fit into an engine of so many GPUs; below 0 where its weights do not."""
    share = settings.engine_share * constants.gpu_bytes - constants.engine_reserve_bytes
    return (tensor_parallel * share - shape.weight_bytes) / shape.cache_bytes


def tensor_parallel(shape: ModelShape, settings: Settings, constants: Constants) -> int | None:
    """GPUs of an engine: the configuration's, doubled until one longest sequence fits; None where none are enough."""
    size = settings.tensor_parallel
    while cache_tokens(shape, settings, constants, size) < settings.sample_tokens:
        size *= 2
        if size > constants.gpus_per_machine:
            return None
    return size


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that has most, by phase, and the word for it.

    Attributes:
        generation, experience, training: the most that is on a GPU in each phase.
        state, activations: of the actor, of `training`.
        engine: what the engines take of a GPU while they generate.
        word: of REASONS.
    """

    generation: float
    experience: float
    training: float
    state: float
    activations: float
    engine: float
    word: str

    @property
    def most(self) -> float:
        """Of all phases."""
        return max(self.generation, self.experience, self.training)


def gpu_memory(shape: ModelShape, settings: Settings, constants: Constants, method: Method, total: int) -> Memory:
    """Where `total` GPUs are shared as the settings say. The critic has the actor's shape.

    While a phase of another role goes on, a colocated model leaves its 16-bit weights on the GPU if it sleeps
    (OpenRLHF keeps them there), else everything; an engine leaves nothing if it sleeps, else its share.
    """
    size = tensor_parallel(shape, settings, constants)

    def state(role: str) -> float:
        ranks = settings.ranks(role, method, total)
        host = settings.optimizer_on_host
        return model_state_bytes(shape.parameters, settings.zero_stage, ranks, optimizer_on_host=host)

    def weights(role: str) -> float:
        return shape.weight_bytes / (settings.ranks(role, method, total) if settings.zero_stage == 3 else 1)

    engine = settings.engine_share * constants.gpu_bytes
    reference = weights("reference") if settings.has_reference(method) and not settings.reference_on_host else 0.0
    trained = method.trained
    activations = {model: activation_bytes(shape, settings, constants, logits=model == "actor") for model in trained}
    forward = forward_bytes(shape, settings, constants)
    if settings.colocated:
        idle = {model: weights(model) if settings.training_sleeps else state(model) for model in trained}
        beside = reference + (0.0 if settings.engine_sleeps else engine)
        generation = engine + sum(idle.values()) + reference
        experience = forward + sum(idle.values()) + beside
        training = max(state(m) + activations[m] + sum(idle[n] for n in trained if n != m) for m in trained) + beside
    else:
        on_actor = reference if "reference" not in settings.gpus else 0.0
        generation = engine
        experience = forward + max(state("actor") + on_actor, reference)
        training = max(state(m) + activations[m] + (on_actor if m == "actor" else 0.0) for m in trained)
    alone = max(state(model) + activations[model] for model in trained)
    room = constants.gpu_bytes - constants.reserve_bytes
    word = "fits"
    if size is None:
        word = "engine"
    elif _too_few(settings, method, total, size):
        word = "GPUs"
    elif alone > room:
        word = "training"
    elif max(generation, experience, training) > room:
        word = "together"
    elif not fills_step(settings, method, total):
        word = "batch"
    return Memory(generation, experience, training, state("actor"), activations["actor"], engine, word)


def _too_few(settings: Settings, method: Method, total: int, engine: int) -> bool:
    """Whether a role has not the GPUs of one engine, or of one rank; where roles have their own, each needs one."""
    roles = 0 if settings.colocated else len(settings.roles(method))
    ranks = settings.gpus_of("actor", method, total)
    return total < roles or settings.gpus_of("engines", method, total) < engine or ranks < settings.copies


def fills_step(settings: Settings, method: Method, total: int) -> bool:
    """Whether an optimizer step has a micro-batch for every rank of each trained model, as DeepSpeed requires."""
    ranks = max(settings.ranks(model, method, total) for model in method.trained)
    return settings.train_samples >= ranks * settings.micro_train


def replay_bytes(settings: Settings, constants: Constants, *, groups: float | None = None) -> float:
    """Of the replay buffer on the host: of `groups` groups of mean length, or of a full one of the longest samples.

    Where there is a reference model, the log-probs of a response's tokens under it are stored as well.
    """
    tokens, responses = float(settings.sample_tokens), float(settings.response_tokens)
    if groups is not None:
        length = lengths(settings, constants)
        tokens, responses = length.total, length.response
    else:
        groups = min(settings.replay_capacity, settings.replay_steps * settings.prompts)
    reference = LOG_PROB * responses if settings.reference else 0.0
    return groups * settings.group_size * (tokens * constants.stored_token_bytes + reference)


def hard_bytes(settings: Settings, constants: Constants) -> float:
    """Of a full hard buffer, which has prompts alone, at 4 bytes a token."""
    return settings.hard_capacity * 4.0 * constants.prompt_share * settings.prompt_tokens


def delayed_weight_bytes(shape: ModelShape, settings: Settings, method: Method) -> float:
    """Host memory of each engine for the delayed weights; 0 where none are ever put back."""
    return float(shape.weight_bytes) if keeps_delayed_weights(settings.schedule(method)) else 0.0

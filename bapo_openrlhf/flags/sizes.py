"""What OpenRLHF's flags say of the sizes of batches, steps and micro-batches, and of the GPUs of each role."""

import math
from types import SimpleNamespace
from typing import NamedTuple

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.schedule import ROUNDS
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.methods import registry

ENOUGH_STEPS = 100  # trainer steps that `init` writes at least, and below which `check` names the flag for more


def batch_arithmetic(args: SimpleNamespace) -> BatchArithmetic:
    """The arithmetic of OpenRLHF's (nested) arguments."""
    flags = Flags.of(args)
    skips = args.adapt.enabled and args.adapt.skip_zero_advantage
    return BatchArithmetic(
        group_size=args.rollout.n_samples_per_prompt,
        capacity=flags.capacity,
        rollout_groups=args.rollout.batch_size,
        train_batch=args.train.batch_size,
        ranks={model: flags.ranks(model) for model in flags.loaded if model != "reward"},
        micro_train=args.train.micro_batch_size,
        most_skipped=most_skipped(args, flags.capacity) if skips else 0,
    )


def most_skipped(args: SimpleNamespace, capacity: int) -> int:
    """Samples that optimizer steps count in addition to a full batch, at most (--adapt.skip_zero_advantage).

    They are filtered fresh responses. So they have room in the batch if it is all that a step generates.
    """
    adapt, kind = args.adapt, registry.method_class(args.adapt.method)
    if adapt.filter == "none" and registry.takes(kind, "filter"):
        return 0
    fresh = most_rounds(args) * args.rollout.batch_size
    only_fresh = registry.takes(kind, "replay_steps") and not (adapt.replay_steps or adapt.reevaluate_every)
    groups = max(fresh - capacity, 0) if only_fresh else fresh
    return int(groups * args.rollout.n_samples_per_prompt)


def left_over(args: SimpleNamespace, samples: int) -> int:
    """Samples of a batch of `samples` that plain OpenRLHF does not train on, which may be small at the end of the data.

    Each rank trains on whole micro-batches. With dynamic batching all ranks train on whole optimizer steps.
    """
    sizes = batch_arithmetic(args)
    if args.train.dynamic_batch_enable:
        full = sizes.rollout_groups * sizes.group_size // sizes.train_batch
        return samples - min(full, samples // sizes.train_batch) * sizes.train_batch
    most, ranks = args.rollout.micro_batch_size, sizes.ranks["actor"]
    batches = [min(most, samples - start) for start in range(0, samples, most)]
    share = math.ceil(len(batches) / ranks)  # forward-pass batches of one rank
    return sum(sum(batches[rank * share : (rank + 1) * share]) % sizes.micro_train for rank in range(ranks))


def epoch_steps(args: SimpleNamespace, prompts: int, candidates: int) -> int:
    """Trainer steps of one pass through the data. A step draws `candidates` prompts for each that it generates for."""
    drawn: int = args.rollout.batch_size * candidates
    if args.adapt.partial_rollout_tokens is not None:
        return prompts // drawn + 1  # the last one may have no prompts, and finish what is in flight
    return math.ceil(prompts / drawn)


def run_steps(args: SimpleNamespace, prompts: int, candidates: int) -> int:
    """Trainer steps of a whole run: of all its passes."""
    return epoch_steps(args, prompts, candidates) * int(args.train.num_episodes)


def actor_steps(args: SimpleNamespace, prompts: int, candidates: int) -> int:
    """Optimizer steps that the actor's learning-rate schedule spans.

    With batch adaptation every batch counts as a full one, because a cosine would rise again after too few steps.
    """
    train = args.train
    if not args.adapt.enabled:  # as OpenRLHF counts them
        samples = prompts * args.rollout.n_samples_per_prompt
        return int(samples // train.batch_size * train.num_episodes * train.max_epochs)
    return run_steps(args, prompts, candidates) * batch_arithmetic(args).optimizer_steps * int(train.max_epochs)


def response_tokens(args: SimpleNamespace) -> int:
    """Tokens of the longest response."""
    return int(args.rollout.max_new_tokens or args.data.max_len)


def fits_solution(args: SimpleNamespace, prompt: int, solution: int) -> bool:
    """Whether a response to a prompt could hold a worked solution with its end; both are numbers of tokens."""
    return bool(solution <= response_tokens(args) and prompt + solution <= args.data.max_len)


def most_rounds(args: SimpleNamespace) -> int:
    """Rollout batches whose fresh groups reach the trainer in one step, at most; several with partial rollouts."""
    if args.algo.dynamic_filtering_enable:
        return ROUNDS
    budget = args.adapt.partial_rollout_tokens
    return 1 if budget is None else math.ceil(response_tokens(args) / budget)


def critic_steps(args: SimpleNamespace, actor_steps: int) -> int:
    """Largest number of optimizer steps of the critic, in which its learning-rate schedule ends.

    With --adapt.critic_groups generated, its step has all groups that the trainer step generates and a replayed batch.
    """
    epochs = int(args.adapt.critic_epochs)
    if args.adapt.critic_groups == "batch":
        return actor_steps * epochs + pretraining_steps(args)
    sizes, every = batch_arithmetic(args), args.adapt.reevaluate_every
    steps = actor_steps // (args.train.max_epochs * sizes.optimizer_steps)
    again = (steps - 1) // every if every else 0  # trainer steps that generate hard prompts again
    groups = most_rounds(args) * sizes.rollout_groups + sizes.capacity
    most, more = (
        math.ceil(number * sizes.group_size / sizes.train_batch)
        for number in (groups, groups + args.adapt.most_reevaluated(sizes.rollout_groups))
    )
    return int(((steps - again) * most + again * more) * args.train.max_epochs * epochs) + pretraining_steps(args)


def pretraining_steps(args: SimpleNamespace) -> int:
    """Largest number of optimizer steps of the critic before the actor takes any (--adapt.value_pretraining)."""
    rollout, train = args.rollout, args.train
    # `critic.freezing_steps` N keeps the actor as it is in N + 1 trainer steps.
    passes = args.adapt.value_pretraining * (max(args.critic.freezing_steps, 0) + 1)
    epochs = passes * train.max_epochs * args.adapt.critic_epochs
    responses = most_rounds(args) * rollout.batch_size * rollout.n_samples_per_prompt
    return int(epochs * math.ceil(responses / train.batch_size))


def most_tokens(args: SimpleNamespace, phase: str) -> int | None:
    """Tokens of a micro-batch at most, on one rank, in `phase` "train" or "rollout"; None if it counts samples."""
    tokens = args.adapt.micro_batch_tokens
    if tokens is None and args.train.dynamic_batch_enable:
        tokens = getattr(args, phase).max_tokens_per_gpu
    return None if tokens is None else tokens * args.ds.tensor_parallel_size


class Block(NamedTuple):
    """Some GPUs, and the roles that are on them."""

    gpus: int
    roles: list[str]


def blocks_of(args: SimpleNamespace, *, critic: bool, reference: bool) -> dict[str, Block]:
    """The GPUs of a run, by the role for which they are reserved.

    The roles are "actor", "reference", "critic", "reward" (a reward model) and "engines" (vLLM). A critic without a
    model of its own has as many GPUs as the actor.
    """
    train, vllm = args.train, args.vllm
    beside_actor = "actor" if train.colocate_all else None
    beside_critic = "critic" if critic and train.colocate_critic_reward else beside_actor
    owners = {"actor": "actor"}
    if reference:
        owners["reference"] = "actor" if train.colocate_actor_ref else beside_actor or "reference"
    if critic:
        owners["critic"] = beside_critic or "critic"
    if not args.reward.remote_url:
        owners["reward"] = beside_critic or "reward"
    owners["engines"] = "engines" if train.async_enable else beside_actor or "engines"
    critics = args.critic if args.critic.model_name_or_path else args.actor
    models = {"actor": args.actor, "reference": args.ref, "critic": critics, "reward": args.reward}
    gpus = {role: model.num_nodes * model.num_gpus_per_node for role, model in models.items()}
    gpus["engines"] = vllm.num_engines * vllm.tensor_parallel_size
    return {owner: Block(gpus[owner], [role for role in owners if owners[role] == owner]) for owner in owners.values()}

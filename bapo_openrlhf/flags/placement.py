"""How the roles of a run share its GPUs (`training/driver/build.py`), and what that needs.

OpenRLHF asserts a part of it when a run starts.
"""

from types import SimpleNamespace
from typing import NamedTuple

from bapo_openrlhf.flags.ranges import MODELS
from bapo_openrlhf.flags.rule import Flags, Rule

# Models that must have the same GPUs with a flag. OpenRLHF compares the critic with the reward model even if no reward
# model is loaded.
TOGETHER = (
    ("train.colocate_all", "actor", "ref"),
    ("train.colocate_actor_ref", "actor", "ref"),
    ("train.colocate_critic_reward", "critic", "reward"),
)


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


def _apart(f: Flags, one: str, other: str) -> bool:
    same = all(f[f"{one}.{size}"] == f[f"{other}.{size}"] for size in ("num_nodes", "num_gpus_per_node"))
    return not same and one in f.loaded and (other in f.loaded or other == "reward")


def _whole_copies(model: str) -> Rule:
    return Rule(f"{model}.num_gpus_per_node", lambda f: model in f.loaded and f.gpus(model) % f.copies,
                lambda f: f"{f.shape(model)}; its GPUs must be a multiple of ds.tensor_parallel_size "
                          f"{f.copies}")  # fmt: skip


def _beside_the_actor(model: str) -> Rule:
    def shares(f: Flags) -> bool:
        beside_critic = model in ("critic", "reward") and f.critic and f["train.colocate_critic_reward"]
        return model in f.loaded and f["train.colocate_all"] and not beside_critic

    return Rule(f"{model}.num_gpus_per_node", lambda f: shares(f) and f.gpus(model) > f.gpus("actor"),
                lambda f: f"{f.shape(model)}; with train.colocate_all it must be at most the actor's "
                          f"{f.gpus('actor')}")  # fmt: skip


def _together(flag: str, one: str, other: str) -> Rule:
    return Rule(f"{other}.num_gpus_per_node", lambda f: f[flag] and _apart(f, one, other),
                lambda f: f"{f.shape(one)}, and {f.shape(other)}; they must be the same with {flag}")  # fmt: skip


PLACEMENT = [
    Rule("vllm.num_engines", lambda f: not f["vllm.num_engines"] and f.packing,
         "{f.packing} packs samples and so needs engines; {it}"),
    *map(_whole_copies, MODELS),
    *map(_beside_the_actor, MODELS[1:]),
    *(_together(*models) for models in TOGETHER),
    Rule("vllm.num_engines",
         lambda f: f["train.colocate_all"] and not f["train.async_enable"] and f["vllm.num_engines"]
         and f.gpus("actor") != f["vllm.num_engines"] * f["vllm.tensor_parallel_size"],
         lambda f: f"{f.words('vllm.num_engines')}; with train.colocate_all, vllm.num_engines x "
                   f"vllm.tensor_parallel_size {f['vllm.tensor_parallel_size']} must be {f.gpus('actor')}: "
                   f"{f.shape('actor')}"),
]  # fmt: skip

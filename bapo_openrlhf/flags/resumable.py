"""What may change when a run is resumed. A change of any other flag since the run's beginning is refused.

A name with * at its end stands for all flags that begin so. A test compares docs/reliability.md with the list.
"""

from bapo_openrlhf.flags.config import GROUPS
from bapo_openrlhf.flags.flag import FROM_NOW_ON, HOW, described


def _described(row: str) -> list[str]:
    return [name for name, its, _ in described(GROUPS, "resumes") if its == row]


# These say nothing about the training. A change of the others in MAY_CHANGE is said and recorded.
PLACES = ("run.*", "ckpt.*", "logger.*")
MAY_CHANGE = {
    "the length of the run": ("train.num_episodes",),
    FROM_NOW_ON: (*_described(FROM_NOW_ON), "train.async_queue_size"),
    "the evaluation": ("eval.*",),
    HOW: (
        "vllm.*", "verifier.*", "ref.*", "reward.num_*", "reward.offload", "train.colocate_*", "ds.enable_sleep",
        "ds.attn_implementation", "ds.use_universal_ckpt", "actor.gradient_checkpointing_*", "rollout.micro_batch_size",
        "rollout.max_tokens_per_gpu", "train.micro_batch_size", "train.max_tokens_per_gpu", *_described(HOW),
    ),
    "where the record, the checkpoints and the logs are, and how often they are written": PLACES,
}  # fmt: skip
# The flags that name the user's own code. It may be mended, and a server may move: this is said and recorded.
CODE = ("reward.remote_url", "train.agent_func_path", "adapt.method")


def may_change(flag: str) -> bool:
    """Whether a flag may have another value when a run is resumed."""
    return any(is_one_of(flag, names) for names in MAY_CHANGE.values())


def is_one_of(flag: str, names: tuple[str, ...]) -> bool:
    """Whether a flag is among names, of which some may end with *."""
    return any(flag.startswith(name[:-1]) if name.endswith("*") else flag == name for name in names)

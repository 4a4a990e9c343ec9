"""Failed calls of the user's reward function or agent, and the names that `extra_logs` must not have.

A reward process reads this file, so it imports only the standard library.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

# What a run itself knows of a response or logs under a name without a slash. `extra_logs` would replace it.
OWN = frozenset((
    "actor_grad_norm", "actor_lr", "critic_grad_norm", "critic_loss", "critic_lr", "dynamic_filtering_pass_rate",
    "entropy_loss", "first_ratio", "generated_samples", "group_reward_std", "is_filter_ratio", "kl", "logprobs_diff",
    "policy_loss", "ppo_clip_ratio", "ppo_kl", "response_clip_ratio", "response_length", "return", "reward", "score",
    "skipped_update", "step", "stopped", "total_length", "truncated", "values", "version_max", "version_min",
    "vllm_kl",
))  # fmt: skip


@dataclass
class Failures:
    """Failed calls by kind (see `RewardFailure`), and by place (FILE:LINE, or empty), with what the first one said."""

    kinds: Counter[str] = field(default_factory=Counter)
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, kind: str, what: str, place: str) -> None:
        """Count a failed call. Of a text of several lines only the first one counts."""
        self.kinds[kind] += 1
        self.causes[kind, place] += 1
        self.first.setdefault((kind, place), " ".join((what.splitlines() or [""])[0].split())[:300])

    @classmethod
    def of(cls, parts: Iterable[Self]) -> Self:
        """Those of all parts together."""
        whole = cls()
        for part in parts:
            whole.kinds.update(part.kinds)
            whole.causes.update(part.causes)
            whole.first = part.first | whole.first
        return whole

    def __str__(self) -> str:
        """The numbers by kind, then the commonest cause with its place. It is empty if no call failed."""
        if not self.kinds:
            return ""
        calls = ", ".join(f"{count} x {kind}" for kind, count in self.kinds.items())
        ((cause, count),) = self.causes.most_common(1)
        where = f" ({cause[1]})" if cause[1] else ""
        return (
            f"Failed calls of the reward function or agent so far: {calls}. "
            f"The commonest cause, {count} of {self.kinds.total()}: {self.first[cause]}{where}"
        )

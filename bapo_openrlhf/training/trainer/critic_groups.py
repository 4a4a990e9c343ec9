"""The critic's own experience: everything that a step generated (`--adapt.critic_groups generated`)."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.critic import beside_batch
from bapo_openrlhf.training.trainer.experience import BatchExperience, ExperienceMaker
from bapo_openrlhf.training.trainer.generated import GeneratedStep
from bapo_openrlhf.training.trainer.recorder import explained_variance
from bapo_openrlhf.training.trainer.run_state import RunState

CRITIC_ONLY = -1  # as the number of a step, OpenRLHF then trains no actor
TOKENS = "tokens/critic"


class CriticGroups:
    """Gives the critic the batch of the actor, together with what the step generated beside it.

    `waiting` is what the critic's next update trains on; nothing if it is the batch of the actor.
    """

    def __init__(self, args: SimpleNamespace, *, state: RunState, maker: ExperienceMaker, critic: Any) -> None:
        self.generated = args.adapt.critic_groups == "generated"
        self.state, self.maker, self.critic = state, maker, critic
        self.waiting: list[Experience] = []

    def make(
        self, generated: GeneratedStep, batch: Batch, experience: BatchExperience | None, *, tokens: int = 0
    ) -> dict[str, float]:
        """Make what the critic's next update trains on, after `tokens` in this step. Returns its metrics."""
        if self.critic is None:
            return {}
        own = experience.samples if experience else []
        if not self.generated:
            return {TOKENS: tokens + tokens_of(own)}
        beside = beside_batch(generated.fresh + generated.reevaluated, batch)
        more = self.maker.for_critic(beside, self.state.weights_since) if beside else []
        self.waiting = list(map(values_only, own + more))
        known = explained_variance(self.waiting)
        metrics = {f"{name}_generated": value for name, value in known.items()}
        return metrics | {TOKENS: tokens + tokens_of(self.waiting)}

    def send(self) -> None:
        """Send the critic what waits for it."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            ray.get(self.critic.take(waiting))


def values_only(sample: Experience) -> Experience:
    """What a critic reads of a sample."""
    unread = dict.fromkeys(("action_log_probs", "base_action_log_probs", "rollout_log_probs", "advantages", "kl"))
    return replace(sample, **unread, info={})


def tokens_of(samples: Sequence[Experience]) -> int:
    """Number of generated tokens."""
    return sum(int(sample.action_mask.sum()) for sample in samples)

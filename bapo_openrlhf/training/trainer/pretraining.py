"""VC-PPO's value pretraining (arXiv 2503.01491): the critic learns before the actor listens to it."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.shift import Gap
from bapo_openrlhf.training.trainer.critic_groups import CRITIC_ONLY, TOKENS, tokens_of
from bapo_openrlhf.training.trainer.experience import ExperienceMaker, origins_of
from bapo_openrlhf.training.trainer.recorder import explained_variance
from bapo_openrlhf.training.trainer.reviewer import Reviewer
from bapo_openrlhf.training.trainer.run_state import RunState


class CriticPretraining:
    """Trains the critic on fresh responses before the first update of the actor."""

    def __init__(
        self,
        args: SimpleNamespace,
        *,
        state: RunState,
        maker: ExperienceMaker,
        reviewer: Reviewer,
        critic: Any,
        train: Callable[[int], dict[str, Any]],
    ) -> None:
        self.epochs = args.adapt.value_pretraining
        self.steps = max(args.critic.freezing_steps, 0) + 1  # the first one, and all in which the actor is frozen
        self.state, self.maker, self.reviewer = state, maker, reviewer
        self.critic, self.train_critic = critic, train

    def train(self, fresh: list[Group], gap: Gap) -> dict[str, Any]:
        """Train the critic on all fresh responses, also on those that the filter drops afterwards. Returns the metrics.

        Together they are what the policy does. Their targets are Monte Carlo returns. The batch of the step is made
        afterwards as in every step, and its values are those of the pretrained critic.
        """
        step = self.state.step
        if not self.epochs or step >= self.steps:
            return {}
        self.state.phase, batch, start = "pretraining the critic", Batch(fresh=fresh), time.perf_counter()
        passed = self.maker.forward(origins_of(batch, self.state.weights_since))
        kept = self.reviewer.review(batch, passed, gap).kept
        if not kept:
            return {}
        samples = self.maker.finish(passed, kept, monte_carlo=True).samples
        before = explained_variance(samples)
        for sample in samples:
            sample.values = sample.returns  # around these, OpenRLHF's loss clips no error
        for _ in range(self.epochs):
            ray.get(self.critic.take(samples))
            loss = self.train_critic(CRITIC_ONLY)["critic_loss"]
        status = {"value/pretraining_loss": loss, "timing/pretraining": time.perf_counter() - start}
        status[TOKENS] = self.epochs * tokens_of(samples)
        return status | {f"{name}_before": value for name, value in before.items()}

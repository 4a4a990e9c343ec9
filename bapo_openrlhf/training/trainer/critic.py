"""What only the critic trains on: all that a step generated, and fresh responses before the actor's first update.

The first is `--adapt.critic_groups generated`. The second is VC-PPO's value pretraining (arXiv 2503.01491): the critic
learns before the actor listens to it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.critic import beside_batch
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.training.trainer.accounts import StepAccounts
from bapo_openrlhf.training.trainer.experience import BatchExperience, ExperienceMaker, origins_of
from bapo_openrlhf.training.trainer.generated import GeneratedStep
from bapo_openrlhf.training.trainer.recorder import explained_variance
from bapo_openrlhf.training.trainer.run_state import RunState

CRITIC_ONLY = -1  # as the number of a step, OpenRLHF then trains no actor
TOKENS = "tokens/critic"


class CriticTraining:
    """Trains the critic before the first update of the actor, and gives it what its other updates train on.

    `samples` is what its next update trains on; nothing if it is the batch of the actor. `train` is OpenRLHF's
    `ppo_train`.
    """

    def __init__(
        self, args: SimpleNamespace, *, state: RunState, maker: ExperienceMaker, critic: Any, accounts: StepAccounts,
        train: Callable[[int], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.args, self.state, self.maker, self.critic = args, state, maker, critic
        self.accounts, self.train, self.epochs = accounts, train, args.adapt.critic_epochs
        self.samples: list[Experience] = []

    def pretrain(self, fresh: list[Group]) -> dict[str, Any]:
        """Train it on all fresh responses, also on those that the filter drops afterwards. Returns the metrics.

        Together they are what the policy does. Their targets are Monte Carlo returns. The batch of the step is made
        afterwards as in every step, and its values are those of the pretrained critic.
        """
        passes, frozen_steps = self.args.adapt.value_pretraining, max(self.args.critic.freezing_steps, 0)
        if not passes or self.state.step > frozen_steps:  # it is done in the first step, and while the actor is frozen
            return {}
        self.state.phase, batch, start = "pretraining the critic", Batch(fresh=fresh), time.perf_counter()
        passed = self.maker.forward(origins_of(batch, self.state.weights_since))
        places = self.accounts.review(batch, passed).kept
        if not places:
            return {}
        samples = self.maker.finish(passed, places, monte_carlo=True).samples
        explained = explained_variance(samples)
        for sample in samples:
            sample.values = sample.returns  # around these, OpenRLHF's loss clips no error
        for _ in range(passes):
            ray.get(self.critic.take(samples))
            loss = self.train(CRITIC_ONLY)["critic_loss"]
        status = {"value/pretraining_loss": loss, "timing/pretraining": time.perf_counter() - start}
        status[TOKENS] = passes * self.epochs * tokens_of(samples)
        return status | {f"{name}_before": value for name, value in explained.items()}

    def make(
        self, generated: GeneratedStep, batch: Batch, experience: BatchExperience | None, *, tokens: int
    ) -> dict[str, float]:
        """Make what the critic's next update trains on, after `tokens` in this step. Returns its metrics."""
        if self.critic is None:
            return {}
        batch_samples = experience.samples if experience else []
        if self.args.adapt.critic_groups == "batch":
            return {TOKENS: tokens + self.epochs * tokens_of(batch_samples)}
        other_groups = beside_batch(generated.fresh + generated.reevaluated, batch)
        other_samples = self.maker.for_critic(other_groups, self.state.weights_since) if other_groups else []
        self.samples = list(map(values_only, batch_samples + other_samples))
        explained = explained_variance(self.samples)
        metrics = {f"{name}_generated": value for name, value in explained.items()}
        return metrics | {TOKENS: tokens + self.epochs * tokens_of(self.samples)}

    def send(self) -> bool:
        """Send the critic what its next update trains on. Returns False if that is the batch of the actor."""
        samples, self.samples = self.samples, []
        if samples:
            ray.get(self.critic.take(samples))
        return bool(samples)


def values_only(sample: Experience) -> Experience:
    """What a critic reads of a sample."""
    nothing = dict.fromkeys(("action_log_probs", "base_action_log_probs", "rollout_log_probs", "advantages", "kl"))
    return replace(sample, **nothing, info={})


def tokens_of(samples: Sequence[Experience]) -> int:
    """Number of generated tokens."""
    return sum(int(sample.action_mask.sum()) for sample in samples)

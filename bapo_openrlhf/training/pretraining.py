"""VC-PPO's value pretraining (arXiv 2503.01491): the critic learns before the actor listens to it."""

import time
from typing import Any

import ray

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.training.checkpoints import WholeCheckpoints
from bapo_openrlhf.training.recorder import explained_variance


class PretrainedCritic(WholeCheckpoints):
    """OpenRLHF's trainer with a critic that is pretrained. `AdaptedPPOTrainer` extends it, and makes the experience."""

    def pretrain_critic(self, fresh: list[Group]) -> dict[str, Any]:
        """Train the critic on all fresh responses, also on those that the filter drops afterwards.

        Together they are what the policy does. Their targets are Monte Carlo returns. The batch of the step is made
        afterwards as in every step, and its values are those of the pretrained critic.

        Args:
            fresh: The fresh groups of this step.

        Returns:
            Its metrics; none in a step without it.
        """
        passes, steps = self.args.adapt.value_pretraining, max(self.args.critic.freezing_steps, 0) + 1
        if not passes or self.step >= steps:
            return {}
        self.phase, maker, start = "pretraining the critic", self.experience_maker, time.perf_counter()
        maker.critic_lambd = 1.0
        _, made, _ = self._make_experience(Batch(fresh=fresh))
        maker.critic_lambd = self.args.adapt.critic_lambd
        if made is None:
            return {}
        before = explained_variance(made.experiences)
        for experience in made.experiences:
            experience.values = experience.returns  # around these, OpenRLHF's loss clips no error
        for _ in range(passes):
            sent = {"method_name": "append", "experience": made.experiences}
            ray.get(self.critic_model_group.async_run_method_batch(**sent))
            loss = self.ppo_train(-1)["critic_loss"]  # OpenRLHF never trains the actor in step -1
        status = {"value/pretraining_loss": loss, "timing/pretraining": time.perf_counter() - start}
        return status | {f"{name}_before": value for name, value in before.items()}

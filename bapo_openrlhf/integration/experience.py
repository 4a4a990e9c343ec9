"""From samples to experience: importance ratios, the KL target and group-relative advantages.

OpenRLHF's experience maker recomputes log-probs with today's actor and values with today's critic, for replayed samples
as for fresh ones. Three things are decided here: against which policy the PPO ratio is taken, towards which policy the
KL penalty pulls, and how group-relative advantages are normalised (Eq. 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from openrlhf.models.utils import compute_approx_kl, compute_reward, masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from bapo_openrlhf.adapt.advantage import group_relative_advantages
from bapo_openrlhf.arithmetic import BatchArithmetic


@dataclass(frozen=True)
class SampleOrigin:
    """Where a sample of the batch comes from.

    Attributes:
        source: fresh, reevaluated or replayed.
        on_policy: whether today's weights generated it.
    """

    source: str
    on_policy: bool


class AdaptedExperienceMaker(RemoteExperienceMaker):
    """OpenRLHF's experience maker for a batch of three sources.

    `origins` is set before each batch: one entry a sample, in the order of the samples. `ratios` holds afterwards, by
    sample, log pi_today(y|x) - log alpha(y|x) summed over tokens, and the largest token's ratio.
    """

    def __init__(self, *args: Any, arithmetic: BatchArithmetic, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arithmetic = arithmetic
        self.origins: Sequence[SampleOrigin] = ()
        self.log_ratios = np.zeros(0)

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Forward-pass batches such that every data-parallel rank gets equally many samples."""
        for index, sample in enumerate(rollout_samples):
            sample.index = [index]
        pad = self.tokenizer.pad_token_id
        return [
            Experience.concat_experiences(rollout_samples[start:end], pad)
            for start, end in self.arithmetic.shares_of(len(rollout_samples))
        ]

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """As OpenRLHF's, then old log-probs and KL target as configured; (B, A) tensors throughout."""
        experiences = super().make_experience(samples_list)
        adapt = self.args.adapt
        self.log_ratios = np.zeros(len(self.origins))
        for experience in experiences:
            today, behaviour, mask = experience.action_log_probs, experience.rollout_log_probs, experience.action_mask
            self.log_ratios[experience.index] = ((today - behaviour) * mask).sum(-1).double().numpy()
            if adapt.kl_target == "behaviour":
                self._pull_towards_behaviour(experience)
            if adapt.ratio == "behaviour":
                on_policy = torch.tensor([self.origins[index].on_policy for index in experience.index])
                experience.action_log_probs = old_log_probs(today, behaviour, on_policy)
        return experiences

    def _pull_towards_behaviour(self, experience: Experience) -> None:
        """D_KL(pi_theta || alpha) of Eq. 3 in the place of the KL to the reference model."""
        today, behaviour, mask = experience.action_log_probs, experience.rollout_log_probs, experience.action_mask
        if self.args.algo.kl.use_loss:
            experience.base_action_log_probs = behaviour
            return
        experience.kl = compute_approx_kl(today, behaviour, kl_estimator=self.args.algo.kl.estimator) * mask
        experience.info["kl"] = masked_mean(experience.kl, mask, dim=-1)

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Critic path: OpenRLHF's GAE. Group-relative path: Eq. 2, then OpenRLHF's shaping with the KL penalty."""
        if self.advantage_estimator != "group_norm":
            return super().compute_advantages_and_returns(experiences)
        for experience in experiences:
            experience.rewards = experience.rewards.float()
        apply_length_penalties(experiences, self.args)
        order = np.concatenate([experience.index for experience in experiences])
        rewards = np.empty(len(order))
        rewards[order] = torch.cat([experience.rewards for experience in experiences]).double().numpy()
        grouped = rewards.reshape(-1, self.args.rollout.n_samples_per_prompt)
        advantages = group_relative_advantages(grouped, self.args.adapt.eps).reshape(-1)
        spread = np.repeat(grouped.std(axis=-1), grouped.shape[1])
        for experience in experiences:
            shaped = compute_reward(
                torch.from_numpy(advantages[experience.index]).float(),
                self.kl_ctl.value,
                experience.kl,
                action_mask=experience.action_mask,
                reward_clip_range=self.args.reward.clip_range,
            )
            experience.returns = self.get_cumulative_returns(shaped, experience.action_mask, gamma=1.0)
            experience.advantages = experience.returns.clone()
            experience.info["return"] = shaped.sum(dim=-1)
            experience.info["group_reward_std"] = torch.from_numpy(spread[experience.index]).float()
            experience.kl = None
        return experiences


def old_log_probs(today: torch.Tensor, behaviour: torch.Tensor, on_policy: torch.Tensor) -> torch.Tensor:
    """Log-probs in the denominator of the PPO ratio (Eq. 3: rho = pi_theta / alpha).

    Where today's policy generated the sample, the actor's own log-probs are the behaviour policy's; else the stored.

    Args:
        today, behaviour: (B, A).
        on_policy: bool (B,).
    """
    return torch.where(on_policy.unsqueeze(-1), today, behaviour.to(today.dtype))

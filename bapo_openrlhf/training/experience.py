"""From samples to experience: importance ratios, the KL target and group-relative advantages.

OpenRLHF's experience maker recomputes log-probs with today's actor and values with today's critic, for replayed samples
as for fresh ones. Three things are decided here: against which policy the PPO ratio is taken, towards which policy the
KL penalty pulls, and how group-relative advantages are normalised (Eq. 2). The reference model is that of `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from openrlhf.models.utils import compute_approx_kl, compute_reward, masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from bapo_openrlhf.adapt.advantage import group_relative_advantages
from bapo_openrlhf.adapt.first_update import SourceTokens
from bapo_openrlhf.adapt.monitor import SOURCES
from bapo_openrlhf.adapt.vtrace import vtrace
from bapo_openrlhf.training.reference import OncePastReference


@dataclass(frozen=True)
class SampleOrigin:
    """Where a sample of the batch comes from.

    Attributes:
        source: fresh, reevaluated or replayed.
        on_policy: whether today's weights generated it.
        external: whether another model wrote it. There is no behaviour policy then whose probabilities are known: it
            counts as on-policy, so that no ratio, clip or correction of this project is taken against it.
    """

    source: str
    on_policy: bool
    external: bool = False


class NothingToTrain(Exception):
    """No sample of the batch was left once its log-probs were known."""


class AdaptedExperienceMaker(OncePastReference):
    """OpenRLHF's experience maker for a batch of three sources.

    `origins` is set before each batch: one entry a sample, in the order of the samples. `log_ratios` holds afterwards,
    by sample, log pi_today(y|x) - log alpha(y|x) summed over tokens; `tokens`, by source, what the loss will take;
    `errors`, see `group_errors`.

    Args:
        review: called with the log-ratios of all samples, (N,); returns the positions of those to train on, in order.
    """

    def __init__(
        self,
        *args: Any,
        review: Callable[[np.ndarray], Sequence[int]] = lambda log_ratios: range(len(log_ratios)),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.review = review
        self.origins: Sequence[SampleOrigin] = ()
        self.log_ratios = np.zeros(0)
        self.tokens: dict[str, SourceTokens] = {}
        self.errors = np.zeros(0)
        self._token_log_ratios: list[np.ndarray] = []  # (B, A) of each experience, for the V-trace returns
        self._loss_log_ratios: list[torch.Tensor] = []  # (B, A) of each experience

    @torch.no_grad()
    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """As OpenRLHF's, then the sources are weighed; and what the loss takes of each is noted."""
        experiences = super().make_experience_batch(rollout_samples)
        self.errors = group_errors(experiences, self.args.rollout.n_samples_per_prompt)
        self._weigh(experiences)
        self.tokens = {source: self._tokens_of(source, experiences) for source in SOURCES}
        return experiences

    def _weigh(self, experiences: Sequence[Experience]) -> None:
        """Scale the advantages of a source by its weight, after they were computed and whitened.

        PPO's clipped objective is positively homogeneous in A: min(rho c A, clip(rho) c A) = c min(rho A, clip(rho) A)
        for c > 0, also with the dual clip and for GSPO. So this weighs the source in the policy loss; the critic's
        returns stay.
        """
        weights = {"reevaluated": self.args.adapt.reevaluated_weight, "replayed": self.args.adapt.replayed_weight}
        for experience in experiences:
            factors = torch.tensor([weights.get(self.origins[index].source, 1.0) for index in experience.index])
            if (factors != 1).any():
                experience.advantages = experience.advantages * factors.unsqueeze(-1)

    def _tokens_of(self, source: str, experiences: Sequence[Experience]) -> SourceTokens:
        parts: list[tuple[torch.Tensor, ...]] = []
        for experience, log_ratios in zip(experiences, self._loss_log_ratios, strict=True):
            origins = [self.origins[index] for index in experience.index]
            rows = torch.tensor([origin.source == source and not origin.external for origin in origins])
            chosen = experience.action_mask.bool() & rows.unsqueeze(-1)
            numbers = [log_ratios, experience.advantages]
            if experience.values is not None:
                numbers.append(experience.values - experience.returns)
            parts.append(tuple(number[chosen].float() for number in numbers))
        return SourceTokens(*(torch.cat(number).numpy() for number in zip(*parts, strict=True)))

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """As OpenRLHF's, then old log-probs and KL target as configured; (B, A) tensors throughout."""
        experiences = super().make_experience(samples_list)
        adapt = self.args.adapt
        self.log_ratios = np.zeros(len(self.origins))
        for experience in experiences:
            self.log_ratios[experience.index] = token_log_ratios(experience).sum(-1).numpy()
        kept = list(self.review(self.log_ratios))
        if len(kept) < len(self.origins):
            experiences = self._only(experiences, kept)
        self._token_log_ratios, self._loss_log_ratios = [], []
        for experience in experiences:
            today, behaviour = experience.action_log_probs, experience.rollout_log_probs
            origins = [self.origins[index] for index in experience.index]
            external = torch.tensor([origin.external for origin in origins])
            on_policy = torch.tensor([origin.on_policy for origin in origins]) | external
            # On-policy, what they differ by is the engine's rounding, which V-trace would take for another policy.
            off_policy = token_log_ratios(experience).masked_fill(on_policy.unsqueeze(-1), 0.0)
            self._token_log_ratios.append(off_policy.numpy())
            if adapt.kl_target == "behaviour":
                self._pull_towards_behaviour(experience, external)
            if adapt.ratio == "behaviour":
                experience.action_log_probs = old_log_probs(today, behaviour, on_policy)
            self._loss_log_ratios.append(self._loss_log_ratio(today, experience))
        return experiences

    def _loss_log_ratio(self, today: torch.Tensor, experience: Experience) -> torch.Tensor:
        """Log of the ratio that OpenRLHF's loss clips, (B, A), were it computed with today's policy."""
        gspo = self.args.actor.policy_loss_type == "gspo"  # one ratio for a response: its tokens' geometric mean
        corrected = gspo and self.args.algo.advantage.is_correction_level != "off"
        old = experience.rollout_log_probs if corrected else experience.action_log_probs
        mask = experience.action_mask.bool()
        log_ratio = torch.where(mask, today.float() - old.float(), 0.0)
        if gspo:
            log_ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand(mask.shape)
        return log_ratio

    def _only(self, experiences: list[Experience], kept: Sequence[int]) -> list[Experience]:
        """The samples at these positions, dealt to the ranks anew.

        Raises:
            NothingToTrain: there are none.
        """
        self.origins = [self.origins[index] for index in kept]
        self.log_ratios = self.log_ratios[list(kept)]
        if not kept:
            raise NothingToTrain
        rows = {index: (experience, row) for experience in experiences for row, index in enumerate(experience.index)}
        dealt = self.split_rollout_samples([row_of(*rows[index]) for index in kept])
        self._forget()
        return dealt

    def _pull_towards_behaviour(self, experience: Experience, external: torch.Tensor) -> None:
        """D_KL(pi_theta || alpha) of Eq. 3 in the place of the KL to the reference model.

        Args:
            external: bool (B,), samples that another model wrote; today's policy takes the place of theirs.
        """
        today, mask = experience.action_log_probs, experience.action_mask
        behaviour = old_log_probs(today, experience.rollout_log_probs, external)
        if self.args.algo.kl.use_loss:
            experience.base_action_log_probs = behaviour
            return
        experience.kl = compute_approx_kl(today, behaviour, kl_estimator=self.args.algo.kl.estimator) * mask
        experience.info["kl"] = masked_mean(experience.kl, mask, dim=-1)

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Critic path: OpenRLHF's GAE, or V-trace. Group-relative path: Eq. 2, then OpenRLHF's shaping with the KL."""
        if self.advantage_estimator != "group_norm":
            # OpenRLHF asks for the returns of one experience after the other.
            self._next_log_ratios = iter(self._token_log_ratios)
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

    @torch.no_grad()
    def get_advantages_and_returns(
        self, values: torch.Tensor, rewards: torch.Tensor, action_mask: torch.Tensor, gamma: float, lambd: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns (B, A) of one experience: GAE or V-trace."""
        log_ratios = next(self._next_log_ratios)
        if self.args.adapt.returns == "gae":
            return super().get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)
        advantages, returns = vtrace(
            values.double().numpy(),
            rewards.double().numpy(),
            log_ratios,
            action_mask.numpy(),
            gamma=gamma,
            lambd=lambd,
            rho_max=self.args.adapt.vtrace_rho_max,
            c_max=self.args.adapt.vtrace_c_max,
        )
        return torch.from_numpy(advantages).float(), torch.from_numpy(returns).float()


def token_log_ratios(experience: Experience) -> torch.Tensor:
    """log pi_today - log alpha of each generated token, (B, A), float64; 0 elsewhere."""
    difference = experience.action_log_probs.double() - experience.rollout_log_probs.double()
    return torch.where(experience.action_mask.bool(), difference, 0.0)


def group_errors(experiences: Sequence[Experience], size: int) -> np.ndarray:
    """How wrong the model still is about each group, in the order of their samples: (N / size,).

    The mean over a group's tokens of |value - return| under a critic, else of |A|.
    """
    count = sum(len(experience.index) for experience in experiences) // size
    total, tokens = np.zeros(count), np.zeros(count)
    for experience in experiences:
        error = experience.advantages if experience.values is None else experience.values - experience.returns
        mask = experience.action_mask.bool()
        places = np.array(experience.index) // size
        np.add.at(total, places, torch.where(mask, error.double().abs(), 0.0).sum(-1).numpy())
        np.add.at(tokens, places, mask.sum(-1).numpy())
    return total / np.maximum(tokens, 1)


def row_of(experience: Experience, row: int) -> Experience:
    """One sample of an experience, as an experience of its own."""
    size = len(experience.index)

    def pick(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: pick(item) for key, item in value.items()}
        return value[row : row + 1] if isinstance(value, (list, torch.Tensor)) and len(value) == size else value

    return Experience(**{field.name: pick(getattr(experience, field.name)) for field in fields(Experience)})


def old_log_probs(today: torch.Tensor, behaviour: torch.Tensor, on_policy: torch.Tensor) -> torch.Tensor:
    """Log-probs in the denominator of the PPO ratio (Eq. 3: rho = pi_theta / alpha).

    Where today's policy generated the sample, the actor's own log-probs are the behaviour policy's; else the stored.

    Args:
        today, behaviour: (B, A).
        on_policy: bool (B,).
    """
    return torch.where(on_policy.unsqueeze(-1), today, behaviour.to(today.dtype))

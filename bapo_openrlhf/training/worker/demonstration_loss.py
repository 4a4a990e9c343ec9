"""The loss of the tokens of worked solutions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from openrlhf.models import aggregate_loss
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.demonstrations import shaped


def demonstration_loss(
    log_probs: torch.Tensor,
    experience: Experience,
    normalisers: Mapping[str, Any],
    *,
    token_level: bool = True,
    cross_entropy: bool = False,
) -> torch.Tensor:
    """The mean loss of the tokens of demonstrations: -f(p) A for each (`adapt.demonstrations.shaped`), or -log p.

    log p has the shape (B, A). `aggregate_loss` normalises it: all tokens count alike, or all samples.
    """
    mask = experience.action_mask.bool() & experience.rollout_log_probs.isnan()
    losses = -log_probs if cross_entropy else -shaped(log_probs.exp()) * experience.advantages
    return aggregate_loss(losses, mask, token_level or cross_entropy, **normalisers)


def without_demonstrations(experience: Experience) -> Experience:
    """The experience with demonstrations masked out, for everything that knows a behaviour policy."""
    shown = experience.rollout_log_probs.isnan()
    mask, log_probs = experience.action_mask, experience.rollout_log_probs
    return replace(experience, action_mask=mask * ~shown, rollout_log_probs=log_probs.masked_fill(shown, 0.0))

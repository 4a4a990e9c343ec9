"""Parts of the actor's loss that OpenRLHF's does not have: the veto, demonstrations, and a look at the first ratio."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from openrlhf.models import aggregate_loss
from openrlhf.models.utils import masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.corrections import shaped, vetoed
from bapo_openrlhf.adapt.shift import ENOUGH


def after_veto(
    log_probs: torch.Tensor, experience: Experience, limit: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The advantages of a micro-batch, shape (B, A), with 0 for tokens that leave the policy loss, and its metrics.

    They leave by the veto of `--adapt.veto_ratio`, by the ratio of this update. A token that leaves still counts in the
    mean over tokens, so that the others do not count more.
    """
    if limit is None:
        return experience.advantages, {}
    mask = experience.action_mask.bool()
    veto = vetoed((log_probs - experience.action_log_probs).detach(), experience.advantages, mask, limit)
    share = masked_mean(veto.float(), mask, dim=None)
    return experience.advantages.masked_fill(veto, 0.0), {"importance/vetoed_share": share}


def demonstration_loss(
    log_probs: torch.Tensor,
    experience: Experience,
    normalisers: Mapping[str, Any],
    token_level: bool,
    cross_entropy: bool,
) -> torch.Tensor:
    """The mean loss of the tokens of demonstrations: -f(p) A for each (`adapt.corrections.shaped`), or -log p.

    log p has the shape (B, A). `aggregate_loss` normalises it: all tokens count alike, or all samples.
    """
    mask = experience.action_mask.bool() & experience.rollout_log_probs.isnan()
    losses = -log_probs if cross_entropy else -shaped(log_probs.exp()) * experience.advantages
    return aggregate_loss(losses, mask, token_level or cross_entropy, **normalisers)


def without_demonstrations(experience: Experience) -> Experience:
    """The experience with demonstrations masked out, for everything that knows a behaviour policy."""
    mask, log_probs = experience.action_mask, experience.rollout_log_probs
    demonstrations = log_probs.isnan()
    return replace(
        experience, action_mask=mask * ~demonstrations, rollout_log_probs=log_probs.masked_fill(demonstrations, 0.0)
    )


class FirstRatio:
    """The first ratio is 1: before the first update, the loss computes the log-probs that the actor computed before.

    They may only differ by rounding, so mean |log ratio| has a limit (`adapt.shift.Gap.explained`). On a CPU they are
    equal to the last bit if the micro-batches have equal shapes.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._sums = torch.zeros(2, dtype=torch.double)  # of |log ratio|, and of tokens

    def add(self, log_probs: torch.Tensor, experience: Experience) -> None:
        """Count the tokens of a micro-batch, of which the loss computed these log-probs, shape (B, A)."""
        mask = experience.action_mask.bool()
        changes = (log_probs.detach().float() - experience.action_log_probs.float()).abs().masked_fill(~mask, 0.0)
        sums = torch.stack([values.sum(dtype=torch.double) for values in (changes, mask)])  # without waiting for a GPU
        self._sums = self._sums.to(sums.device) + sums

    def require(self) -> tuple[float, float]:
        """The mean of |log ratio|, and the number of its tokens.

        Raises:
            RuntimeError: It is above the limit. Tokens that are missing to ENOUGH count as 0.
        """
        total, tokens = self._sums.tolist()
        mean = total / max(tokens, 1)
        if not total <= self.limit * max(tokens, ENOUGH):
            raise RuntimeError(
                f"the ratio does not start at 1: before the first update, the mean |log ratio| of {tokens:.0f} tokens "
                f"is {mean:.2g}, and rounding explains {self.limit:.2g}; the gradient was not applied. So the model "
                "computes other log-probs while it trains. Usual causes are noise that its config.json does not call "
                "dropout, and layers that do something else in training"
            )
        return mean, tokens

"""The veto of `--adapt.veto_ratio`: tokens that leave the policy loss of an update, by the ratio of this update."""

import torch
from openrlhf.models.utils import masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.corrections import vetoed


def after_veto(
    log_probs: torch.Tensor, experience: Experience, limit: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The advantages of a micro-batch, shape (B, A), with 0 for tokens that leave the loss, and its metrics.

    A token that leaves still counts in the mean over tokens, so that the others do not count more.
    """
    if limit is None:
        return experience.advantages, {}
    mask = experience.action_mask.bool()
    leaves = vetoed((log_probs - experience.action_log_probs).detach(), experience.advantages, mask, limit)
    share = masked_mean(leaves.float(), mask, dim=None)
    return experience.advantages.masked_fill(leaves, 0.0), {"importance/vetoed_share": share}

"""The first ratio is 1: before the first update, the loss computes the log-probs that the actor has computed before.

They may only differ by rounding. On a CPU they are equal to the last bit if the micro-batches have equal shapes.
"""

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.shift import ENOUGH


class FirstRatio:
    """Compares log-probs in the first optimizer step. Mean |log ratio| has a limit (`adapt.shift.Gap.explained`)."""

    def __init__(self, limit: float) -> None:
        self.limit, self.tokens, self._moved = limit, 0, torch.zeros(())

    def add(self, log_probs: torch.Tensor, experience: Experience) -> None:
        """Count the tokens of a micro-batch, of which the loss computed these log-probs, shape (B, A)."""
        moved = (log_probs.detach().float() - experience.action_log_probs.float())[experience.action_mask.bool()]
        self.tokens += len(moved)
        self._moved = self._moved.to(moved.device) + moved.abs().sum()

    def require(self) -> float:
        """The mean of |log ratio|.

        Raises:
            RuntimeError: It is above the limit. Tokens that are missing to ENOUGH count as 0.
        """
        moved = float(self._moved)
        mean = moved / max(self.tokens, 1)
        if not moved <= self.limit * max(self.tokens, ENOUGH):
            raise RuntimeError(
                f"the ratio does not start at 1: before the first update, the mean |log ratio| of {self.tokens} tokens "
                f"is {mean:.2g}, and rounding explains {self.limit:.2g}; the gradient was not applied. So the model "
                "computes other log-probs while it trains. Usual causes are noise that its config.json does not call "
                "dropout, and layers that do something else in training"
            )
        return mean

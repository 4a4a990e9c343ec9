"""Each response passes the reference model once.

The reference is the same at every step. So a replayed response's log-probs under it are kept with the response, and
only samples without them are sent to it: OpenRLHF sends it every sample of every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import RayActorGroup

from bapo_openrlhf.adapt.group import REFERENCE, Response
from bapo_openrlhf.training.dealing import DealtExperienceMaker, Places


class OncePastReference(DealtExperienceMaker):
    """OpenRLHF's experience maker, whose reference model is passed by each response once.

    `responses` is set before each batch: those of its samples, in order. If there is a reference model, all of them
    have its log-probs in their `extras` afterwards. Batch and buffers share a response's extras: what is in no buffer
    is forgotten with its batch. `reference_kept` is the number of generated tokens that were not sent this time.

    Args:
        reference: names the reference model; what was kept under another name is not used.
    """

    def __init__(self, *args: Any, reference: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = reference
        self.responses: Sequence[Response] = ()
        self.reference_kept = 0

    def _wanted(self, group: RayActorGroup) -> Places:
        """All samples, or those that the reference has not seen."""
        if group is not self.initial_model_group:
            return super()._wanted(group)
        kept = [self._kept(response) for response in self.responses]
        self.reference_kept = sum(len(log_probs) for log_probs in kept if log_probs is not None)
        return [place for place, log_probs in enumerate(kept) if log_probs is None]

    def _sorted_back(self, group: RayActorGroup, rows: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """A model's answers; those of the reference are kept first, and are then those of all samples."""
        if group is not self.initial_model_group:
            return super()._sorted_back(group, rows)
        for place, row in rows.items():
            mask = self._samples[place].action_mask[0].bool()
            self.responses[place].extras[REFERENCE] = (self.reference, row[: len(mask)][mask].float().numpy())
        return [self._log_probs(batch) for batch in self._batches]

    def _log_probs(self, batch: Experience) -> torch.Tensor:
        """Those of a batch's samples, (B, A); 0 where nothing was generated, as OpenRLHF's models have it."""
        mask = batch.action_mask.bool()
        kept = [torch.from_numpy(self._kept(self.responses[place])) for place in batch.index]
        return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(kept))

    def _kept(self, response: Response) -> Any:
        """The reference's log-probs of a response, float32 (A,); None if they are not known."""
        reference, log_probs = response.extras.get(REFERENCE, (None, None))
        return log_probs if reference == self.reference else None

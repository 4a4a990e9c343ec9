"""Log-probs under the reference model, which are kept with the responses.

OpenRLHF sends every sample of every batch to the reference model. It is the same at every step, so here a response is
sent only once: a replayed response already has its log-probs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.group import REFERENCE, Response
from bapo_openrlhf.training.trainer.dealing import Places


class ReferenceLogProbs:
    """Log-probs of a batch's responses under the reference model, in the `extras` of each response.

    Log-probs that were kept under another name of a model are not used. A batch and the buffers share a response's
    extras. So the log-probs of a response that is in no buffer are gone when its batch is gone.
    """

    def __init__(self, name: str, responses: Sequence[Response]) -> None:
        self.name, self.responses = name, responses
        kept = [self._kept(response) for response in responses]
        self.missing: Places = [place for place, log_probs in enumerate(kept) if log_probs is None]
        self.kept_tokens = sum(len(log_probs) for log_probs in kept if log_probs is not None)

    def keep(self, rows: Mapping[int, torch.Tensor], samples: Sequence[Experience]) -> None:
        """Keep the reference model's answers, of shape (A,) by a sample's position, with their responses."""
        for place, row in rows.items():
            mask = samples[place].action_mask[0].bool()
            self.responses[place].extras[REFERENCE] = (self.name, row[mask].float().numpy())

    def of(self, place: int, mask: torch.Tensor) -> torch.Tensor:
        """Log-probs of the sample at this position, shape (1, A); 0 if a token was not generated, as in OpenRLHF."""
        return torch.zeros(mask.shape).masked_scatter(mask.bool(), torch.from_numpy(self._kept(self.responses[place])))

    def _kept(self, response: Response) -> Any:
        """The log-probs of a response, float32, shape (A,); None if they are not known."""
        name, log_probs = response.extras.get(REFERENCE, (None, None))
        return log_probs if name == self.name else None

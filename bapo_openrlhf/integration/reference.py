"""Each response passes the reference model once.

The reference is the same at every step. So a replayed response's log-probs under it are kept with the response, and
only samples without them are sent to it: OpenRLHF sends it every sample of every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from bapo_openrlhf.adapt.group import REFERENCE, Response
from bapo_openrlhf.arithmetic import BatchArithmetic


class OncePastReference(RemoteExperienceMaker):
    """OpenRLHF's experience maker, whose reference model is passed by each response once.

    `responses` is set before each batch: those of its samples, in order. Where there is a reference model, all of them
    have its log-probs in their `extras` afterwards. Batch and buffers share a response's extras: what is in no buffer
    is forgotten with its batch. `reference_kept` is the number of generated tokens that were not sent this time.

    Args:
        arithmetic: how samples are shared by the ranks.
        reference: names the reference model; what was kept under another name is not used.
    """

    def __init__(self, *args: Any, arithmetic: BatchArithmetic, reference: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arithmetic = arithmetic
        self.reference = reference
        self.responses: Sequence[Response] = ()
        self.reference_kept = 0
        self._samples: Sequence[Experience] = ()  # of the batch, without padding
        self._batches: Sequence[Experience] = ()  # the same as forward-pass batches
        self._sent: list[int] = []  # positions of the samples that the reference is asked for
        self._sent_batches: Sequence[Experience] = ()  # the same as forward-pass batches
        self._pending: Any = None  # Ray's references to its answers

    @torch.no_grad()
    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """As OpenRLHF's."""
        self._samples = rollout_samples
        return super().make_experience_batch(rollout_samples)

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """As OpenRLHF's."""
        self._batches = samples_list
        experiences = super().make_experience(samples_list)
        self._samples = self._batches = self._sent_batches = ()
        return experiences

    def _dispatch_forward(self, group: Any, sync_condition: bool, **inputs: Any) -> Any:
        """OpenRLHF's call of a model; that of the reference is for the samples it has not seen.

        They are shared among its ranks anew, for replayed samples stand together at a batch's end. All ranks must get
        equally many: where some are missing, the last one is sent again.
        """
        if group is not self.initial_model_group:
            return super()._dispatch_forward(group, sync_condition, **inputs)
        kept = [self._kept(response) for response in self.responses]
        new = [place for place, log_probs in enumerate(kept) if log_probs is None]
        self.reference_kept = sum(len(log_probs) for log_probs in kept if log_probs is not None)
        self._sent, self._sent_batches, self._pending = new, self._batches, []
        if len(new) < len(self.responses):
            self._sent = new + new[-1:] * (-len(new) % self.arithmetic.shares)
            samples = [self._samples[place] for place in self._sent]
            self._sent_batches = self.split_rollout_samples(samples) if samples else ()
        if self._sent:
            # OpenRLHF's names of the inputs are those of an experience's fields; one ends in _list.
            inputs = {
                name: [getattr(batch, name.removesuffix("_list")) for batch in self._sent_batches] for name in inputs
            }
            self._pending = super()._dispatch_forward(group, sync_condition, **inputs)
        return self._pending

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list[Any]:
        """OpenRLHF's gathering of a model's answers, one a forward-pass batch; the reference's for all samples."""
        answers = super()._flatten_results(refs, duplicate_factor)
        if refs is not self._pending:
            return answers
        self._pending = None
        for batch, log_probs in zip(self._sent_batches, answers, strict=True):
            for place, row, mask in zip(batch.index, log_probs, batch.action_mask.bool(), strict=True):
                extras = self.responses[self._sent[place]].extras
                extras[REFERENCE] = (self.reference, row[mask].float().numpy())
        return [self._log_probs(batch) for batch in self._batches]

    def _log_probs(self, batch: Experience) -> torch.Tensor:
        """Those of a batch's samples, (B, A); 0 where nothing was generated, as OpenRLHF's models have it."""
        mask = batch.action_mask.bool()
        kept = [torch.from_numpy(self._kept(self.responses[place])) for place in batch.index]
        return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(kept))

    def _kept(self, response: Response) -> Any:
        """The reference's log-probs of a response, float32 (A,); None where they are not known."""
        reference, log_probs = response.extras.get(REFERENCE, (None, None))
        return log_probs if reference == self.reference else None

"""Demonstrations on their way to the actor: the tokens of worked solutions, as samples, and the loss of these tokens.

A demonstration joins the batch after everything was computed that knows a behaviour policy: log-probs, the review,
advantages and metrics. Its sample has nan in the place of behaviour log-probs. This marks its tokens, and any number
that were computed from them by mistake would be nan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from openrlhf.models import aggregate_loss
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.advantage import relative_rewards
from bapo_openrlhf.adapt.batch import Demonstration
from bapo_openrlhf.adapt.demonstrations import shaped


class Solutions:
    """The worked solutions of the data, as token ids by the text of the prompt.

    A solution ends with the tokenizer's end token. One that a response could not hold is left out.

    Args:
        pairs: Text of each prompt as the engines get it, and its worked solution; None or "" if it has none.
        tokenizer: That of the actor.
        max_new: Most tokens of a response, or None.
        max_len: Most tokens of a prompt and its response.

    Attributes:
        too_long: Number of solutions that are left out.
    """

    def __init__(
        self, pairs: Iterable[tuple[str, str | None]], tokenizer: Any, *, max_new: int | None, max_len: int
    ) -> None:
        self._tokens: dict[str, tuple[np.ndarray, int]] = {}  # prompt and solution, and where the solution begins
        self.too_long = 0
        for text, solution in pairs:
            if not solution or text in self._tokens:
                continue
            prompt, answer = (tokenizer(text=part, add_special_tokens=False)["input_ids"] for part in (text, solution))
            answer = [*answer, *([] if answer[-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id])]
            if len(answer) > (max_new or max_len) or len(prompt) + len(answer) > max_len:
                self.too_long += 1
                continue
            self._tokens[text] = np.array([*prompt, *answer], dtype=np.int32), len(prompt)

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, text: str) -> bool:
        return text in self._tokens

    def sample(self, text: str, advantage: float, like: Experience | None = None) -> Experience:
        """The demonstration of a prompt as a sample with a batch dimension of 1.

        Args:
            text: The prompt.
            advantage: Of each of its tokens. Cross-entropy does not read it.
            like: A sample of the batch that it joins. It gets the same entries of `info`, all 0.
        """
        ids, start = self._tokens[text]
        mask = torch.arange(1, len(ids)).unsqueeze(0) >= start
        zeros = torch.zeros(mask.shape)
        return Experience(
            sequences=torch.from_numpy(ids.copy()).unsqueeze(0),
            attention_mask=torch.ones(1, len(ids), dtype=torch.bool),
            action_mask=mask,
            action_log_probs=zeros.clone(),
            base_action_log_probs=None if like is None or like.base_action_log_probs is None else zeros.clone(),
            rollout_log_probs=zeros.masked_fill(mask, torch.nan),
            advantages=advantage * mask.float(),
            returns=zeros.clone(),
            prompts=[text],
            labels=[None],
            images=[None],
            mm_train_inputs=[None],
            rewards=torch.zeros(1),
            scores=None if like is None or like.scores is None else torch.zeros(1),
            response_length=torch.tensor([len(ids) - start]),
            truncated=torch.tensor([False]),
            total_length=torch.tensor([float(len(ids))]),
            info={} if like is None else {key: torch.zeros_like(value[:1]) for key, value in like.info.items()},
        )

    def samples(self, demonstrations: Sequence[Demonstration], estimator: str, eps: float, like: Any) -> list[Any]:
        """The samples of X4, each with the advantage that the estimator makes of its rewards."""
        advantages = [
            relative_rewards(estimator, r[-1:], r, eps) for r in (np.array(d.rewards) for d in demonstrations)
        ]
        return [
            self.sample(shown.prompt.text, float(advantage[0]), like)
            for shown, advantage in zip(demonstrations, advantages, strict=True)
        ]


class DemonstrationLoss:
    """The loss of the tokens of demonstrations.

    Attributes:
        cross_entropy: Whether it is -log p. Otherwise it is -f(p) A (`adapt.demonstrations.shaped`).
    """

    cross_entropy = False

    def __call__(
        self, log_probs: torch.Tensor, experience: Experience, token_level: bool, normalisers: Mapping[str, Any]
    ) -> torch.Tensor:
        """The mean loss of a micro-batch, as `aggregate_loss` normalises it.

        Args:
            log_probs: log p of each token, shape (B, A).
            experience: The micro-batch.
            token_level: Whether all tokens count alike, and not all samples.
            normalisers: See `updates.Part`.
        """
        mask = experience.action_mask.bool() & experience.rollout_log_probs.isnan()
        losses = -log_probs if self.cross_entropy else -shaped(log_probs.exp()) * experience.advantages
        return aggregate_loss(losses, mask, token_level, **normalisers)


def shown_tokens(experience: Experience) -> float:
    """Number of tokens of demonstrations in an experience, on the CPU."""
    log_probs = experience.rollout_log_probs
    return 0.0 if log_probs is None else float(log_probs.isnan().sum())


def is_demonstration(sample: Experience) -> bool:
    """Whether a sample is a demonstration."""
    return shown_tokens(sample) > 0


def without_demonstrations(experience: Experience) -> Experience:
    """The experience with demonstrations masked out, for everything that knows a behaviour policy."""
    shown = experience.rollout_log_probs.isnan()
    mask, log_probs = experience.action_mask, experience.rollout_log_probs
    return replace(experience, action_mask=mask * ~shown, rollout_log_probs=log_probs.masked_fill(shown, 0.0))

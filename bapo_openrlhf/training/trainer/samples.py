"""Responses, of the answers of engines and as OpenRLHF's samples. A sample is an `Experience` of one response."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.group import Group, Prompt, Response, prompt_state, response_state


def spans_of(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The pair (start, end) of each run of ones in a 0/1 mask of shape (T,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return tuple((int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def reward_of(value: Any) -> float | None:
    """A reward function's answer for one response, rounded to float32 as in OpenRLHF; None if it is not finite."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float32).flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return numbers[0] if len(numbers) == 1 and math.isfinite(numbers[0]) else None


def generated_response(answer: Mapping[str, Any], *, max_len: int = 2048, **_: Any) -> Response:
    """An engine's answer as the layer stores it. A reward that is no finite number is nan; so are missing log-probs.

    Spans and log-probs are those of OpenRLHF's sample of the answer (`sample_of`).
    """
    reward, score = reward_of(answer.get("reward")), reward_of(answer.get("scores"))
    if reward is None or score is None:
        score = reward  # OpenRLHF does the same if there is no score
    tokens, log_probs = np.array(answer["observation_tokens"][:max_len]), answer["rollout_log_probs"]
    mask = np.zeros(len(tokens), dtype=bool)
    for start, end in answer["action_ranges"]:
        mask[start:end] = True
    mask[:1] = False  # OpenRLHF never trains on the first token
    values = {"response_clip_ratio": len(tokens) >= max_len, "reward": reward, "score": score}
    return Response(
        token_ids=tokens,
        action_spans=spans_of(mask),
        log_probs=np.full(mask.sum(), np.nan) if log_probs is None else np.array(log_probs[:max_len])[mask],
        reward=math.nan if reward is None else reward,
        extras={
            "info": {name: value for name, value in values.items() if value is not None}
            | {name: _number(value) for name, value in answer.get("extra_logs", {}).items()},
            "score": score,
            "truncated": bool(answer.get("truncated", False)),
            "mm_train_inputs": answer.get("mm_train_inputs"),
        },
    )


def _number(value: Any) -> Any:
    """A logged number, rounded as in OpenRLHF, which makes a tensor of it."""
    number = value.flatten()[0].item() if isinstance(value, torch.Tensor) else value
    return torch.tensor([number]).item()


@dataclass
class Answers:
    """The responses to a prompt, before it is known whether they can be used."""

    prompt: Prompt
    responses: list[Response]

    @property
    def judged(self) -> bool:
        """Whether all its responses have a reward."""
        return all(math.isfinite(response.reward) for response in self.responses)

    @property
    def usable(self) -> bool:
        """Whether all its responses have a reward and finite behaviour log-probs."""
        return self.judged and all(np.isfinite(response.log_probs).all() for response in self.responses)

    @property
    def rewards(self) -> list[float]:
        """The rewards of its responses."""
        return [response.reward for response in self.responses]

    def state_dict(self) -> dict[str, Any]:
        """It as plain data."""
        return {"prompt": prompt_state(self.prompt), "responses": list(map(response_state, self.responses))}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Inverse of `state_dict`."""
        return cls(Prompt(**state["prompt"]), [Response(**response) for response in state["responses"]])


def sample_of(prompt: Prompt, response: Response) -> Experience:
    """The prompt and the response as a sample: the one that OpenRLHF's generator makes of the engine's answer.

    Tokens are int32, and masks bool, until the workers make them int64 (`packing.WIDE`): 10 bytes a token, and not 28.
    """
    length = len(response.token_ids)
    mask, log_probs = np.zeros(length, dtype=bool), np.zeros(length, dtype=np.float32)
    for start, end in response.action_spans:
        mask[start:end] = True
    log_probs[mask] = response.log_probs
    spans = response.action_spans or ((0, 0),)
    extras = response.extras
    return Experience(
        sequences=torch.from_numpy(response.token_ids.copy()).unsqueeze(0),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        action_mask=torch.from_numpy(mask[1:]).unsqueeze(0),
        rollout_log_probs=torch.from_numpy(log_probs[1:]).unsqueeze(0),
        prompts=[prompt.text],
        labels=[prompt.label],
        images=[prompt.images],
        mm_train_inputs=[extras["mm_train_inputs"]],
        rewards=torch.tensor([response.reward]),
        scores=None if extras["score"] is None else torch.tensor([extras["score"]]),
        response_length=torch.tensor([spans[-1][1] - spans[0][0]]),
        truncated=torch.tensor([extras["truncated"]]),
        total_length=torch.tensor([float(length)]),
        info={key: torch.tensor([value]) for key, value in extras["info"].items()},
    )


def samples_of(groups: Sequence[Group | Answers]) -> list[Experience]:
    """All responses of the groups as samples, in order."""
    return [sample_of(group.prompt, response) for group in groups for response in group.responses]

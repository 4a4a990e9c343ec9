"""Responses on their way from the engines to the trainer, and the names of what the engines say of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

# Entries of a sample's `info`: the lowest and the highest version of the weights that generated the response. A version
# is a number of updates.
VERSIONS = ("version_min", "version_max")
STOPPED = "stopped"  # entry of the `info` of a response that is not finished


@dataclass(frozen=True)
class PackedGroup:
    """The G responses to a prompt as they travel between processes. Iterating over it gives OpenRLHF's responses.

    Attributes:
        shared: What is equal for all responses: prompt, label, images, and their tensors.
        responses: For each response, all its other entries.
        prompt_tokens: Token ids of the prompt and of a prefix that is context, int32, shape (P,).
        tokens: Generated token ids of all responses one after the other, int32, shape (T,).
        log_probs: Their log-probs, float32, shape (T,); None if they were not asked for.
        lengths: Number of generated tokens of each response, shape (G,).
    """

    shared: dict[str, Any]
    responses: list[dict[str, Any]]
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray | None
    lengths: list[int]

    @classmethod
    def of(
        cls, shared: dict[str, Any], prompt_tokens: Sequence[int], results: Sequence[tuple[Any, dict[str, Any]]]
    ) -> Self:
        """Pack what vLLM generated for each response to a prompt (`Generated`), and its other entries."""
        parts = [generated for generated, _ in results]
        log_probs = [np.array(part.log_probs, dtype=np.float32) for part in parts if part.log_probs is not None]
        return cls(
            shared,
            [response for _, response in results],
            np.array(prompt_tokens, dtype=np.int32),
            np.concatenate([np.array(part.token_ids, dtype=np.int32) for part in parts]),
            np.concatenate(log_probs) if log_probs else None,
            [len(part.token_ids) for part in parts],
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The responses in their order, with arrays in place of OpenRLHF's lists of tokens and log-probs."""
        start, end = len(self.prompt_tokens), 0
        for response, length in zip(self.responses, self.lengths, strict=True):
            begin, end = end, end + length
            log_probs = None
            if self.log_probs is not None:
                log_probs = np.concatenate([np.zeros(start, dtype=np.float32), self.log_probs[begin:end]])
            yield {
                **self.shared,
                **response,
                "observation_tokens": np.concatenate([self.prompt_tokens, self.tokens[begin:end]]),
                "action_ranges": [(start, start + length)],
                "rollout_log_probs": log_probs,
            }


@dataclass(frozen=True)
class Prefix:
    """What a response has already: it goes on in a later step (partial rollouts), or its prompt has a prefix.

    Tokens are int32, and log-probs float32, of shape (P,). Without log-probs, the tokens are context, and not its own.
    """

    tokens: np.ndarray
    log_probs: np.ndarray | None = None

    @property
    def is_context(self) -> bool:
        """Whether its tokens are context, and all responses of the request begin with them."""
        return self.log_probs is None

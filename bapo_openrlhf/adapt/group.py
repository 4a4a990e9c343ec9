"""A group: one prompt with its G responses, rewards and behaviour log-probs (Eq. 4).

The unit that the layer selects and stores. Tokens and log-probs are kept in compact arrays (4 bytes a token id, 4 bytes
a log-prob), so that a stored token costs at most 8 bytes, and 12 where there is a reference model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

# In a response's extras, once they were computed: (name of the reference model, its float32 (A,) log-probs of the
# generated tokens).
REFERENCE = "reference"


def as_fraction(value: Fraction | float | str) -> Fraction:
    """Exact value of a threshold as the user wrote it: "1/8", 0.1 and 0.125 become 1/8, 1/10 and 1/8.

    Floats go through their shortest decimal form, so 0.1 means one tenth and not its nearest binary float.

    Raises:
        ValueError: when the value is no finite number.
    """
    if isinstance(value, Fraction):
        return value
    text = str(value).strip()
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{value!r} is not a number or a fraction such as 1/8") from None


def exact_reward(reward: float) -> Fraction:
    """A reward as the number its author meant: 0.1 is one tenth, also after a trip through a float32 tensor."""
    reward = float(reward)
    if reward in (0.0, 1.0):
        return Fraction(int(reward))
    with np.errstate(over="ignore"):
        single = np.float32(reward)
    return Fraction(str(single) if float(single) == reward else repr(reward))


def exact_sum(numbers: Sequence[Fraction]) -> Fraction:
    """Their sum; over one common denominator, for added one by one they took most of the layer's time."""
    ratios = [number.as_integer_ratio() for number in numbers]
    common = math.lcm(*(denominator for _, denominator in ratios))
    return Fraction(sum(numerator * (common // denominator) for numerator, denominator in ratios), common)


@dataclass(frozen=True)
class Prompt:
    """A prompt of the dataset.

    Attributes:
        text: the prompt as sent to the rollout engine.
        label: what the reward function compares with (OpenRLHF's label column).
        images: image paths or URLs of a vision-language prompt, else None.
    """

    text: str
    label: Any = None
    images: Any = None

    @cached_property
    def id(self) -> str:
        """u_i of Eq. 4: 16 hex digits, the same in every run, for equal text, label and images."""
        payload = repr((self.text, self.label, self.images)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(payload, digest_size=8).hexdigest()


@dataclass(frozen=True, eq=False)
class Response:
    """One response y to a prompt x, as the behaviour policy alpha generated it.

    Attributes:
        token_ids: int32 (T,), prompt and response tokens.
        action_spans: (start, end) positions in token_ids that the policy generated; one pair for a single turn.
        log_probs: float32 (A,), log alpha of the generated tokens, in order; A is the total length of action_spans.
        reward: r(x, y), a plain float.
        extras: whatever else travels with the response (info scalars, image tensors, log-probs under the reference
            model); the layer never reads it. A copy of the response shares it.
        policy_step: updates behind the weights that generated it, where its group's does not say so: in a group whose
            responses stem from several policies. None: its group's.
        external: written by no policy of this run. Its log_probs are then zeros: whoever wrote it is taken to have
            been certain of each token, as LUFFY does (arXiv 2504.14945).
    """

    token_ids: np.ndarray
    action_spans: tuple[tuple[int, int], ...]
    log_probs: np.ndarray
    reward: float
    extras: dict[str, Any] = field(default_factory=dict)
    policy_step: int | None = None
    external: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.ascontiguousarray(self.token_ids, dtype=np.int32))
        object.__setattr__(self, "log_probs", np.ascontiguousarray(self.log_probs, dtype=np.float32))
        edges = [0, *(edge for span in self.action_spans for edge in span), len(self.token_ids)]
        if edges != sorted(edges):
            raise ValueError(f"action spans {self.action_spans} are not in order within {len(self.token_ids)} tokens")
        actions = sum(end - start for start, end in self.action_spans)
        if actions != len(self.log_probs):
            raise ValueError(f"{len(self.log_probs)} log-probs for {actions} generated tokens")

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and log-probs, those under the reference model included."""
        _, reference = self.extras.get(REFERENCE, (None, None))
        return self.sampled_nbytes + (0 if reference is None else int(reference.nbytes))

    @property
    def sampled_nbytes(self) -> int:
        """Bytes of tokens and log-probs as they were sampled: what the reference model adds later is left out."""
        return self.token_ids.nbytes + self.log_probs.nbytes


@dataclass(frozen=True, eq=False)
class Group:
    """One prompt with its G responses (Eq. 4).

    Attributes:
        uid: number of this group among all generated ones, increasing; the order of generation.
        prompt: the prompt x.
        responses: the G responses.
        step: trainer step t in which the group was generated.
        policy_step: number of updates behind the weights that generated it; equal to `step` when on-policy. A response
            with a `policy_step` of its own, one stored in an earlier step, goes by that one.

    Raises:
        ValueError: no responses, or a reward that is not finite.
    """

    uid: int
    prompt: Prompt
    responses: tuple[Response, ...]
    step: int
    policy_step: int

    def __post_init__(self) -> None:
        if not self.responses:
            raise ValueError(f"group of prompt {self.prompt.text!r} has no responses")
        for response in self.responses:
            if not math.isfinite(response.reward):
                raise ValueError(f"reward of prompt {self.prompt.text!r} is {response.reward}; it must be finite")

    @property
    def size(self) -> int:
        """G, the number of responses."""
        return len(self.responses)

    @cached_property
    def rewards(self) -> tuple[Fraction, ...]:
        """The G rewards as exact numbers."""
        return tuple(exact_reward(response.reward) for response in self.responses)

    @cached_property
    def mean(self) -> Fraction:
        """Group mean reward mu, exact: 1/8 is 1/8."""
        return exact_sum(self.rewards) / self.size

    @cached_property
    def variance(self) -> Fraction:
        """Population variance of the rewards, exact; mu (1 - mu) for 0/1 rewards (Eq. 37)."""
        return exact_sum([reward * reward for reward in self.rewards]) / self.size - self.mean**2

    @cached_property
    def is_binary(self) -> bool:
        """Whether every reward is 0 or 1."""
        return all(reward in (0, 1) for reward in self.rewards)

    def policy_step_of(self, response: Response) -> int:
        """Updates behind the weights that generated one of its responses."""
        return self.policy_step if response.policy_step is None else response.policy_step

    def is_on_policy(self, step: int) -> bool:
        """Whether the weights of trainer step `step` generated every response of this group."""
        return all(self.policy_step_of(response) == step for response in self.responses)

    def standalone(self, response: Response) -> Response:
        """One of its responses as it can be put into another group: it says itself which weights generated it."""
        return replace(response, policy_step=self.policy_step_of(response))

    def exchange(self, position: int, stored: Response) -> Group:
        """This group with a stored response of the same prompt in the place of one of its own.

        It keeps its uid, and so its state in the ledger, its step and its policy_step, which are the other responses'.

        Args:
            position: of the response that gives way.
            stored: as `standalone` gives it.

        Raises:
            ValueError: the stored response does not say which weights generated it.
        """
        if stored.policy_step is None:
            raise ValueError(f"a response to prompt {self.prompt.text!r} has no policy_step of its own")
        responses = list(self.responses)
        responses[position] = stored
        return replace(self, responses=tuple(responses))

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and log-probs of all responses."""
        return sum(response.nbytes for response in self.responses)

    @property
    def sampled_nbytes(self) -> int:
        """The same without those under the reference model: a number that never changes."""
        return sum(response.sampled_nbytes for response in self.responses)


def mean_reward(groups: Iterable[Group]) -> Fraction | None:
    """Exact mean reward over all responses of the groups; None when there are none."""
    rewards = [reward for group in groups for reward in group.rewards]
    return exact_sum(rewards) / len(rewards) if rewards else None

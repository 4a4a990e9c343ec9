"""The shift: how far today's policy has moved from the one that generated the tokens, without the engine's rounding.

For a generated token let r = log pi - log alpha, with pi today's policy and alpha the one that generated it. An engine
and the actor round differently, so r is not 0 even if both hold the same weights. This part of r does not depend on the
policy's move, so the squares add up:

    mean of r^2 over the tokens = shift + gap

The *gap* is the same mean over on-policy responses, in the last step that had some. Neither number grows with the
length of a response, as the TV distance does (Eq. 9, 10). A mean of |r| could not be corrected by subtracting.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.theory import LOG_RATIO_CAP, sampled_tv

# Tokens that a group borrows from the others of its source, so that few tokens do not decide by chance. The best number
# is the variance of r^2 in a group over the variance between groups, both in units of the squared mean. In a run of
# docs/results.md it was 9.7^2 / 1.1^2.
BORROWED = 80
# OpenRLHF's default limits of the weight of a token (`--algo.advantage.is_correction_threshold`).
BAND = (0.5, 5.0)
# What rounding explains of gap/kl. In 6,290 steps of 179 runs whose records are kept, all in bf16, it was at most 2e-4.
# docs/smoke.md has larger models, and what other weights in the engine make of it.
USUAL_KL = 0.003
# Tokens over which gap/kl and the first ratio are judged. If there are fewer, the missing ones count as if they had no
# gap, so that a few tokens end a run only if they differ much.
ENOUGH = 1000
ROUNDING = 0.01  # mean |log ratio| of the actor with itself that is rounding, however small the gap is


class TokenSums(NamedTuple):
    """Sums over the generated tokens of each response, shape (N,) each: of 1, r^2, k3, |r|, and 1 outside of BAND.

    k3 = e^r - 1 - r, with r capped at 20 in the power. Its mean over tokens from alpha is KL(alpha || pi).
    """

    tokens: np.ndarray
    squares: np.ndarray
    k3: np.ndarray
    absolute: np.ndarray
    outside: np.ndarray

    @classmethod
    def of(cls, log_ratios: np.ndarray, mask: np.ndarray) -> Self:
        """The sums of some responses, from r of each token (0 where none was generated) and the mask, shape (N, A)."""
        k3 = np.expm1(np.minimum(log_ratios, LOG_RATIO_CAP)) - log_ratios
        outside = (log_ratios < math.log(BAND[0])) | (log_ratios > math.log(BAND[1]))
        parts = mask, log_ratios**2, k3, np.abs(log_ratios), outside
        return cls(*(part.sum(-1) for part in parts))

    def at(self, places: np.ndarray | Sequence[int] | slice) -> Self:
        """The sums of these responses: their positions, a slice of them, or a bool for each response."""
        return type(self)(*(numbers[places] for numbers in self))


@dataclass(frozen=True)
class Gap:
    """What engine and actor differ by if they hold the same weights, measured on on-policy responses.

    Attributes:
        square: Mean of r^2 over their tokens: what the shift subtracts.
        tv: Their sampled TV distance (Eq. 9, 10), which is all rounding.
        kl, absolute: Means of k3 and of |r| over their tokens.
        cut_share: Share of their tokens that truncated or masked weights would cut, with the limits of BAND.
        step: Trainer step in which it was measured. None if it never was. Then the numbers are 0.
    """

    square: float = 0.0
    tv: float = 0.0
    kl: float = 0.0
    absolute: float = 0.0
    cut_share: float = 0.0
    tokens: int = 0
    step: int | None = None

    @property
    def explained(self) -> float:
        """The largest mean |log ratio| of the actor's own log-probs, computed twice, that is rounding."""
        return max(2 * self.absolute, ROUNDING)

    def measured(self, step: int, log_ratios: np.ndarray, sums: TokenSums) -> "Gap":
        """The gap of on-policy responses with finite log ratios, shape (N,); the one from before if there are none."""
        tokens = sums.tokens.sum()
        if not tokens:
            return self
        square, kl, absolute, cut_share = (float(numbers.sum() / tokens) for numbers in sums[1:])
        return Gap(square, sampled_tv(log_ratios), kl, absolute, cut_share, int(tokens), step)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of trainer step `step`. There are none if the gap was never measured."""
        if self.step is None:
            return {}
        numbers = {f"gap/{name}": number for name, number in asdict(self).items() if name != "step"}
        return numbers | {"gap/age": step - self.step}

    def state_dict(self) -> dict[str, Any]:
        """The gap as plain data. `Gap(**state)` is the inverse."""
        return asdict(self)


def on_policy(groups: Sequence[Group], since: int) -> np.ndarray:
    """Whether today's weights, those since trainer step `since`, generated each response; bool, shape (N,)."""
    return np.array([group.weights_version_of(one) >= since for group in groups for one in group.responses], dtype=bool)


def _moved(sums: TokenSums, from_current: np.ndarray, gap: Gap) -> np.ndarray:
    """The sum over each response's tokens of r^2 less the gap; 0 if today's policy generated it, shape (N,)."""
    return np.where(from_current, 0.0, sums.squares - gap.square * sums.tokens)


def shift(sums: TokenSums, from_current: np.ndarray, gap: Gap) -> float:
    """The shift of today's policy on these responses, at least 0. It is 0 if there are no tokens. All sums are finite.

    A response that today's policy generated (`from_current`, bool of shape (N,)) counts with its tokens and no shift.
    """
    return max(0.0, float(_moved(sums, from_current, gap).sum() / max(sums.tokens.sum(), 1)))


def group_shifts(sums: TokenSums, from_current: np.ndarray, sizes: Sequence[int], gap: Gap) -> np.ndarray:
    """The shift of today's policy on each group of one source, at least 0, shape (groups,): the mean over its tokens.

    A group whose responses come from earlier policies has BORROWED tokens more, at the mean of all such responses. The
    arguments are as in `shift`, group after group, and `sizes` are the groups' numbers of responses.
    """
    if not sizes:
        return np.zeros(0)
    old, moved = np.where(from_current, 0, sums.tokens), _moved(sums, from_current, gap)
    borrowed = BORROWED * moved.sum() / max(old.sum(), 1)
    starts = np.cumsum([0, *sizes[:-1]])
    moved, old, tokens = (np.add.reduceat(numbers, starts) for numbers in (moved, old, sums.tokens))
    of_old = np.where(old > 0, (moved + borrowed) / (old + BORROWED), 0.0)
    shifts: np.ndarray = np.maximum(of_old * old / np.maximum(tokens, 1), 0.0)
    return shifts

"""How difficult prompts are, from their past groups: discounted counts, and how well they forecast."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_openrlhf.adapt.group import Group, Prompt


def successes(group: Group) -> Fraction:
    """s, how many responses are right: the sum of the rewards, each clipped to [0, 1], so a reward of 0.3 is 0.3."""
    return sum((min(max(reward, Fraction(0)), Fraction(1)) for reward in group.rewards), Fraction(0))


class SuccessCounts:
    """Discounted counts of right and wrong responses of each prompt, in 16 bytes a prompt.

    A prompt without any group has (a0, b0). A group of n responses, s of them right, makes of its prompt's counts
    a <- lam a + (1 - lam) a0 + s and b <- lam b + (1 - lam) b0 + (n - s). Other prompts' counts stay as they are.

    Args:
        decay: lam, within [0, 1]. 1 forgets nothing; 0 keeps the last group alone.
        prior_a, prior_b: a0, b0.
    """

    def __init__(self, decay: float, prior_a: float, prior_b: float) -> None:
        self.decay = decay
        self.prior = np.array([prior_a, prior_b])
        self._ids = np.empty(0, np.uint64)  # Prompt.id as a number, ascending
        self._counts = np.empty((0, 2), np.float32)  # a and b of each

    def __len__(self) -> int:
        return len(self._ids)

    def of(self, prompts: Sequence[Prompt]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Counts (P, 2) of the prompts, a and b of each, and (P,) whether there was a group of it."""
        rows, known = self._find(_numbers(prompts))
        counts = np.tile(self.prior, (len(rows), 1))
        counts[known] = self._counts[rows[known]]
        return counts, known

    def _find(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Where each id stands or would stand, and whether it does; found by halving, for there may be millions."""
        rows = np.searchsorted(self._ids, ids)
        known = np.zeros(len(ids), np.bool_)
        within = rows < len(self._ids)
        known[within] = self._ids[rows[within]] == ids[within]
        return rows, known

    def update(self, groups: Sequence[Group]) -> None:
        """Count these groups, in their order. The arrays are new ones: those in a state keep their values."""
        ids = _numbers([group.prompt for group in groups])
        new = np.unique(ids[~self._find(ids)[1]])
        places = np.searchsorted(self._ids, new)
        self._ids = np.insert(self._ids, places, new)
        self._counts = np.insert(self._counts, places, self.prior, axis=0)
        for row, group in zip(np.searchsorted(self._ids, ids), groups, strict=True):
            right = float(successes(group))
            seen = np.array([right, group.size - right])
            self._counts[row] = self.decay * self._counts[row] + (1 - self.decay) * self.prior + seen

    def state_dict(self) -> dict[str, Any]:
        """Ids, uint64 (P,), and counts, float32 (P, 2)."""
        return {"ids": self._ids, "counts": self._counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Decay and prior are not of the state: they may be changed on resume."""
        self._ids, self._counts = state["ids"], state["counts"]


def _numbers(prompts: Sequence[Prompt]) -> NDArray[np.uint64]:
    return np.array([int(prompt.id, 16) for prompt in prompts], np.uint64)


def forecast_metrics(
    groups: Sequence[Group], predicted: NDArray[np.float64], known: NDArray[np.bool_]
) -> dict[str, float]:
    """How well the groups of a step were predicted; a number that no group gives is left out.

    prompts/predicted: mean predicted success probability of the prompts that were generated for.
    prompts/unseen_share: share of them that had no group before.
    prompts/prediction_error: mean |predicted - observed| of the others; observed is s / n.

    Args:
        groups: fresh groups, P of them.
        predicted: (P,) probabilities, of before these groups were known.
        known: (P,) whether the prompt had a group before.
    """
    if not groups:
        return {}
    metrics = {"prompts/predicted": float(predicted.mean()), "prompts/unseen_share": float(1 - known.mean())}
    if known.any():
        observed = np.array([float(successes(group) / group.size) for group in groups])
        metrics["prompts/prediction_error"] = float(np.abs(predicted - observed)[known].mean())
    return metrics

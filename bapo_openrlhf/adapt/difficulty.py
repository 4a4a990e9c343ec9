"""How difficult prompts are, judged by counts of their past groups, and how well these predict."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.metric import declare
from bapo_openrlhf.adapt.rewards import exact_sum


def successes(group: Group) -> Fraction:
    """s, the number of right responses: the sum of the rewards, each clipped to [0, 1]. A reward of 0.3 adds 0.3."""
    return exact_sum([min(max(reward, Fraction(0)), Fraction(1)) for reward in group.rewards])


class SuccessCounts:
    """Discounted counts a and b of right and wrong responses of each prompt: its posterior is Beta(a, b).

    A prompt without any group has the counts (a0, b0), `prior_a` and `prior_b`. A group of n responses, s of them
    right, updates the counts of its prompt: a <- lam a + (1 - lam) a0 + s and b <- lam b + (1 - lam) b0 + (n - s), with
    lam the `decay`: 1 forgets nothing, 0 keeps only the last group. A prompt that had a group takes 16 bytes.
    """

    def __init__(self, decay: float, prior_a: float, prior_b: float) -> None:
        self.decay = decay
        self.prior = np.array((prior_a, prior_b))
        self._ids = np.empty(0, np.uint64)  # Prompt.id as a number, ascending
        self._counts = np.empty((0, 2), np.float32)

    def __len__(self) -> int:
        return len(self._ids)

    def counts_of(self, prompts: Sequence[Prompt]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The counts a and b of the prompts, shape (P, 2), and whether each had a group, shape (P,)."""
        places, has_history = self._find(_numbers(prompts))
        counts = np.tile(self.prior, (len(places), 1))
        counts[has_history] = self._counts[places[has_history]]
        return counts, has_history

    def _find(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The place of each id, or where it would be inserted, and whether it is there. There may be millions."""
        places = np.searchsorted(self._ids, ids)
        has_history = np.zeros(len(ids), np.bool_)
        in_range = places < len(self._ids)
        has_history[in_range] = self._ids[places[in_range]] == ids[in_range]
        return places, has_history

    def update(self, groups: Sequence[Group]) -> None:
        """Learn from the groups of a step, in their order. New arrays are made, so those in a saved state stay."""
        ids = _numbers([group.prompt for group in groups])
        new_ids = np.unique(ids[~self._find(ids)[1]])
        places = np.searchsorted(self._ids, new_ids)
        self._ids = np.insert(self._ids, places, new_ids)
        self._counts = np.insert(self._counts, places, self.prior, axis=0)
        for place, group in zip(np.searchsorted(self._ids, ids), groups, strict=True):
            success_count = float(successes(group))
            old_counts = self.decay * self._counts[place] + (1 - self.decay) * self.prior
            self._counts[place] = old_counts + np.array([success_count, group.size - success_count])

    def state_dict(self) -> dict[str, Any]:
        """Ids, uint64 of shape (P,), and counts, float32 of shape (P, 2)."""
        return {"ids": self._ids, "rows": self._counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Parameters are not part of the state: the constructor gets them."""
        self._ids, self._counts = state["ids"], state["rows"]


def _numbers(prompts: Sequence[Prompt]) -> NDArray[np.uint64]:
    return np.array([int(prompt.id, 16) for prompt in prompts], np.uint64)


FORECAST_METRICS = declare("""
    prompts/known | prompts | Known prompts | | Prompts that have had a group so far.
    prompts/predicted | 0 to 1 | Predicted success | | Mean predicted success of this step's prompts.
    prompts/unseen_share | 0 to 1 | Unseen prompts | | Share of this step's prompts that had no group before.
    prompts/prediction_error | 0 to 1 | Prediction error | | Mean |predicted - observed| of this step's other \
        prompts, where observed is the share of right responses.
""")


def forecast_metrics(
    groups: Sequence[Group], forecasts: NDArray[np.float64], has_history: NDArray[np.bool_]
) -> dict[str, float]:
    """How well P groups were predicted: FORECAST_METRICS but the first. Numbers of no group are left out.

    `forecasts` are success probabilities from before, `has_history` says whether a prompt had a group, shape (P,) each.
    """
    if not groups:
        return {}
    metrics = {"prompts/predicted": float(forecasts.mean()), "prompts/unseen_share": float(1 - has_history.mean())}
    if has_history.any():
        success_rates = np.array([float(successes(group) / group.size) for group in groups])
        metrics["prompts/prediction_error"] = float(np.abs(forecasts - success_rates)[has_history].mean())
    return metrics

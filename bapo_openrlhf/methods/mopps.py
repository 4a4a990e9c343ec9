"""MoPPS, model predictive prompt selection (arXiv 2507.04632): prompts that should be of medium difficulty today.

Paper: "Can Prompt Difficulty be Online Predicted for Accelerating RL Finetuning of Reasoning Models?". Details are
those of its authors' code (thu-rllab/MoPPS, recipe/ours, read at commit a883f51).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fresh_alone
from bapo_openrlhf.adapt.difficulty import SuccessCounts, forecast_metrics
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1


class MoPPS(Method):
    """Generates for the prompts whose success probability, drawn from what is believed of it, is nearest 0.5.

    Each prompt's success probability has the posterior Beta(a, b). In each step one probability is drawn for each of
    `candidates` times as many prompts as needed (Thompson sampling), and those with the least |draw - target| are
    generated for. Their groups then update a <- lam a + (1 - lam) a0 + s and b <- lam b + (1 - lam) b0 + (n - s), with
    s of n responses right. Nothing is replayed or generated again.

    The posterior of a prompt changes only when it is generated for, as in the authors' code.

    Deviations. The authors count right answers; here rewards other than 0 and 1 are clipped to [0, 1] and added up to
    s. Their scripts train on every group; a group of equal rewards has no group-relative advantage, so it is left out
    here, unless `keep_uninformative`.

    Args:
        capacity: B, groups a batch holds at most.
        seed: of the draws.
        candidates: prompts drawn from the data for each one that is generated for. The authors' scripts have 8 for
            Countdown and geometry, 16 for mathematics.
        decay: lam, within [0, 1]: how much of what was seen before the last group still counts. The scripts have 0.5
            for Countdown and geometry, 1 for mathematics.
        prior_a, prior_b: a0 and b0, above 0; 1 and 1 is the uniform distribution.
        target: success probability to aim at, within [0, 1].
        keep_uninformative: whether groups whose rewards are all equal are trained on.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        *,
        capacity: int,
        seed: int = 0,
        candidates: int = 8,
        decay: float = 0.5,
        prior_a: float = 1.0,
        prior_b: float = 1.0,
        target: float = 0.5,
        keep_uninformative: bool = False,
    ) -> None:
        if candidates < 1:
            raise ValueError(f"candidates is {candidates}; it must be at least 1")
        for name, value in (("decay", decay), ("target", target)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must be within [0, 1]")
        for name, value in (("prior_a", prior_a), ("prior_b", prior_b)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be a finite number above 0")
        self.capacity = capacity
        self.candidates = candidates
        self.target = target
        self.keep_uninformative = keep_uninformative
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.posteriors = SuccessCounts(decay, prior_a, prior_b)
        self._metrics: dict[str, float] = {}

    def choose_prompts(self, step: int, candidates: Sequence[Prompt], count: int) -> list[int]:
        """The `count` candidates whose draw is nearest the target, in the order in which they were given."""
        counts, _ = self.posteriors.of(candidates)
        draws = self.rng.beta(counts[:, 0], counts[:, 1])
        nearest = np.argsort(np.abs(draws - self.target), kind="stable")[:count]
        return sorted(int(position) for position in nearest)

    def begin_step(self, step: int) -> list[Prompt]:
        """Nothing is generated again."""
        return []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """The informative fresh groups, at most as many as fit. `reevaluated` is empty."""
        counts, known = self.posteriors.of([group.prompt for group in fresh])
        predicted = counts[:, 0] / counts.sum(axis=1)  # the posterior's mean
        self.posteriors.update(fresh)

        keep = [self.keep_uninformative or has_signal(group) for group in fresh]
        batch = fresh_alone(fresh, keep, self.capacity)
        self._metrics = {
            "groups/capacity": self.capacity,
            "prompts/known": len(self.posteriors),
            **forecast_metrics(fresh, predicted, known),
        }
        return batch

    def metrics(self) -> dict[str, float]:
        """The last step: groups/capacity; prompts/known, prompts that there was a group of; see `forecast_metrics`."""
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Posteriors and generator state."""
        return {
            "method": "mopps",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "posteriors": self.posteriors.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "mopps", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.posteriors.load_state_dict(state["posteriors"])

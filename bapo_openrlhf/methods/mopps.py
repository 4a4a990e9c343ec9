"""MoPPS, model predictive prompt selection (arXiv 2507.04632): prompts that should be of medium difficulty today.

Paper: "Can Prompt Difficulty be Online Predicted for Accelerating RL Finetuning of Reasoning Models?". Details follow
its authors' code (thu-rllab/MoPPS, recipe/ours, read at commit a883f51).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.difficulty import FORECAST_METRICS, SuccessCounts, forecast_metrics
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.base import FilteredMethod, option


@dataclass(eq=False, kw_only=True)
class MoPPS(FilteredMethod):
    """Draws more prompts than it needs, and generates for those that should be solved half of the time.

    Each prompt's success probability has the posterior Beta(a, b). In each step one probability is drawn for each of
    `candidates` times as many prompts as needed (Thompson sampling), and the prompts with the least |draw - target| are
    generated for. Their groups then update a <- lam a + (1 - lam) a0 + s and b <- lam b + (1 - lam) b0 + (n - s) if s
    of n responses are right. The posterior of a prompt changes only when it is generated for, as in the authors' code.
    Nothing is replayed, and no prompt is generated again.

    Deviations: the authors count right answers. Here rewards other than 0 and 1 are clipped to [0, 1] and added up to
    s. Their scripts clip at 0.2 and 0.28 with a dual clip of 10; these are OpenRLHF's flags.

    Args:
        candidates: Prompts drawn from the data for each prompt that is generated for. The authors' scripts use 8 for
            Countdown and geometry, 16 for mathematics.
        decay: lam, within [0, 1]: how much of what was seen before the last group still counts. The scripts use 0.5 for
            Countdown and geometry, 1 for mathematics.
        prior_a, prior_b: a0 and b0, above 0. 1 and 1 is the uniform distribution.
        target: Success probability to aim at, within [0, 1].
    """

    USE = "Use it if the data has many prompts and most are solved always or never."
    SOURCE = "arXiv 2507.04632"
    STATE = ("rng", "posteriors")
    METRICS = FORECAST_METRICS

    candidates: int = option(8, "at least 1")
    decay: float = option(0.5, "in [0, 1]")
    prior_a: float = option(1.0, "finite and above 0")
    prior_b: float = option(1.0, "finite and above 0")
    target: float = option(0.5, "in [0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.posteriors = SuccessCounts(self.decay, self.prior_a, self.prior_b)

    def choose_prompts(self, step: int, candidates: Sequence[Prompt], count: int) -> list[int]:
        """The `count` candidates whose draw is nearest the target, in the order in which they were given."""
        counts, _ = self.posteriors.counts_of(candidates)
        draws = self.rng.beta(counts[:, 0], counts[:, 1])
        return sorted(np.argsort(np.abs(draws - self.target), kind="stable")[:count].tolist())

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """The fresh groups that the filter keeps, at most as many as fit."""
        counts, has_history = self.posteriors.counts_of([group.prompt for group in fresh])
        self.posteriors.update(fresh)
        self.measured = {
            "prompts/known": len(self.posteriors),
            **forecast_metrics(fresh, counts[:, 0] / counts.sum(axis=1), has_history),
        }
        return fill(self.max_responses, fresh, self.keeps(fresh))

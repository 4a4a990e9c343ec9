"""A recipe: prompts by what is known of their difficulty, and replay by measured distances."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.difficulty import FORECAST_METRICS, SuccessCounts
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.base import option
from bapo_openrlhf.methods.bound import BoundBAPO

TARGET = 0.5  # A group has the largest expected variance if its prompt is solved half of the time.


@dataclass(eq=False, kw_only=True)
class PosteriorBAPO(BoundBAPO):
    """BAPO that spends responses on the prompts that are most likely to teach something.

    Each prompt's success probability has a posterior Beta(a, b) (`adapt.difficulty`, prior 1 and 1), which all groups
    of the prompt update. Fresh prompts (X1) and hard prompts (X2) are chosen by the same rule, the Thompson sampling of
    MoPPS (arXiv 2507.04632): a probability is drawn from each posterior, and the prompts with a draw nearest 0.5 are
    generated for. Groups are replayed (X3) as in bapo_bound, by the terms of Theorem 3.2 with measured TV distances.

    Args:
        candidates: Prompts drawn from the data for each fresh prompt that is generated for.
        decay: lam of the posterior, within [0, 1]: how much of what was seen before a prompt's last group still counts.
        least: Least term of a group that is replayed, at most 0.

    Raises:
        ValueError: An option is out of its range.
    """

    NAME = "bapo_posterior"
    SENTENCE = "BAPO that chooses fresh and hard prompts by their posterior of success, and replays by TV distance."
    USE = "Use it if many prompts are solved always or never."
    SOURCE = "this project, after arXiv 2507.04632 and bapo_bound"
    STATE = (*BoundBAPO.STATE, "posteriors")
    METRICS = (*BoundBAPO.METRICS, *FORECAST_METRICS)

    candidates: int = option(8, "at least 1")
    decay: float = option(0.5, "in [0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.posteriors = SuccessCounts(self.decay, 1.0, 1.0)

    def choose_prompts(self, step: int, candidates: Sequence[Prompt], count: int) -> list[int]:
        """The `count` candidates whose draw is nearest 0.5, in the order in which they were given."""
        return self.posteriors.nearest(candidates, count, TARGET, self.rng)

    def draw_hard(self, count: int) -> list[Prompt]:
        """Up to `count` of the hard prompts by the same rule."""
        prompts = [entry.prompt for entry in self.hard.oldest(len(self.hard) if count else 0)]
        return [prompts[position] for position in self.posteriors.nearest(prompts, count, TARGET, self.rng)]

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """The batch of bapo_bound. Everything that was generated updates the posteriors."""
        forecast = self.posteriors.forecast(fresh)
        self.posteriors.update([*fresh, *reevaluated])
        batch = super().build_batch(step, fresh, reevaluated)
        self.measured = {**self.measured, "prompts/known": len(self.posteriors), **forecast}
        return batch

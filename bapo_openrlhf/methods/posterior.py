"""A recipe: BAPO that generates for the prompts that should be solved half of the time today."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.difficulty import FORECAST_METRICS, Ratings
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.bapo import BAPO
from bapo_openrlhf.methods.base import option

TARGET = 0.5  # A group has the largest expected variance if its prompt is solved half of the time.


@dataclass(eq=False, kw_only=True)
class PosteriorBAPO(BAPO):
    """BAPO that spends responses on the prompts that are most likely to teach something.

    The policy has a rating, and each prompt has one (`adapt.difficulty.Ratings`). All groups that are generated update
    both. So a prompt that failed when the policy was weak becomes easier as the policy learns, also while it is not
    generated for. The posteriors of MoPPS (arXiv 2507.04632) are counts of each prompt, which stay as they are. Fresh
    prompts (X1) and, if there are any, hard prompts (X2) are chosen by the Thompson sampling of MoPPS: a success
    probability is drawn from each posterior, and the prompts with a draw nearest 0.5 are generated for. Groups are
    replayed (X3) as in BAPO.

    Args:
        candidates: Prompts drawn from the data for each fresh prompt that is generated for.
        spread: Variance of the difficulties of prompts. The odds of a prompt that is one standard deviation easier are
            exp(sqrt(spread)) times as good.
        drift: Variance by which the policy's rating may move in a step.

    Raises:
        ValueError: An option is out of its range.
    """

    NAME = "bapo_posterior"
    SENTENCE = "BAPO that generates for prompts that should be solved half of the time, by ratings as in chess."
    USE = "Use it if many prompts are solved always or never."
    SOURCE = "this project, after MoPPS, arXiv 2507.04632"
    STATE = (*BAPO.STATE, "ratings")
    METRICS = (*BAPO.METRICS, *FORECAST_METRICS)

    candidates: int = option(8, "at least 1")
    spread: float = option(2.0, "finite and above 0")
    drift: float = option(0.05, "finite and above 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ratings = Ratings(self.spread, self.drift)

    def choose_prompts(self, step: int, candidates: Sequence[Prompt], count: int) -> list[int]:
        """The `count` candidates whose draw is nearest 0.5, in the order in which they were given."""
        return self.ratings.nearest(candidates, count, TARGET, self.rng)

    def draw_hard(self, count: int) -> list[Prompt]:
        """Up to `count` of the hard prompts by the same rule."""
        prompts = [entry.prompt for entry in self.hard.oldest(len(self.hard) if count else 0)]
        return [prompts[position] for position in self.ratings.nearest(prompts, count, TARGET, self.rng)]

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """The batch of BAPO. Everything that was generated updates the ratings."""
        forecast = self.ratings.forecast(fresh)
        self.ratings.update([*fresh, *reevaluated])
        batch = super().build_batch(step, fresh, reevaluated)
        self.measured = {**self.measured, "prompts/known": len(self.ratings), **forecast}
        return batch

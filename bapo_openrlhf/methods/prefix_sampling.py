"""Prefix Sampling ("Rollout Pass-Rate Control", arXiv 2605.05112)."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.prefixes import Prefixes
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.methods.base import FilteredMethod, option


@dataclass(eq=False, kw_only=True)
class PrefixSampling(FilteredMethod):
    """Generates for unbalanced prompts again from the beginning of a right or a wrong response of their own.

    Unbalanced fresh groups are trained on, and their prompts are generated again in the next step. A group whose mean
    is above 0 and below 3/10 gives the beginning of a right response, and one whose mean is above 7/10 and below 1 that
    of a wrong one. This prefix is context: no loss, ratio or length has it. The share of the response that it has moves
    by 0.05, so that the mean reward of such groups stays near 1/2 (`PrefixShare`).

    The rule is that of arXiv 2605.05112, read in its authors' text of March 2026 (Baidu Qianfan), because of the paper
    only summaries could be had. arXiv 2601.18795 has several fixed lengths instead, between 40 % and 80 % of a right
    response, and 2601.20829 only wrong ones.

    Deviations: the authors' prompts with a prefix take the places of fresh ones; here they are generated in addition,
    and the highest reward variance decides if the batch is full. The paper has a moving average for each number of
    right responses, the text one for each kind, as here. The text does not say where it begins; here it is at 1/2. For
    rewards that are not 0 or 1, the responses with the greatest and the least reward count as right and wrong.

    Args:
        reevaluate_every, max_reevaluated_prompts, buffer_size: How often prompts are generated from prefixes, how many
            at a time, oldest first, and how many wait at most.
        prefix_share: First share of a response that is a prefix. The authors have 0.55, and 0.25 if it does not move.
        steered: Whether it moves.
    """

    USE = "Use it if most groups with a signal have one right or one wrong response."
    SOURCE = "arXiv 2605.05112"
    STATE = ("rng", "prefixes")
    METRICS = Prefixes.METRICS
    prefixed = True

    reevaluate_every: int = 1
    max_reevaluated_prompts: int = 128
    buffer_size: int = 256
    prefix_share: Fraction = option(Fraction(11, 20), "in (0, 1)")
    steered: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prefixes = Prefixes(self.buffer_size, self.prefix_share, moves=self.steered)

    def begin_step(self, step: int) -> list[Prompt]:
        """The prompts that wait, oldest first, with their prefixes."""
        return self.prefixes.take(self.max_reevaluated_prompts if due(step, self.reevaluate_every) else 0)

    def unanswered(self, prompts: Sequence[Prompt]) -> None:
        """Forget starts that gave no group."""
        for prompt in prompts:
            self.prefixes.back(prompt)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1 and the groups with a prefix that have a signal."""
        prefixed, unsteered = self.prefixes.review(reevaluated)
        batch = fill(self.max_responses, fresh, self.keeps(fresh), prefixed=prefixed)
        batch.unsteered = unsteered
        self.prefixes.store(fresh, self.rng)
        self.measured = self.prefixes.metrics()
        return batch

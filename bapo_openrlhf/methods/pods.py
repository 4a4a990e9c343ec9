"""PODS: of the responses to a prompt, train on the few whose rewards differ most (arXiv 2504.13818).

Paper: "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning". Details follow its authors'
code (YixuanEvenXu/pods, read at commit 187f43b).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.rewards import exact_sum
from bapo_openrlhf.methods.base import FilteredMethod


@dataclass(eq=False, kw_only=True)
class PODS(FilteredMethod):
    """Generates many responses to each prompt and trains on the few whose rewards differ most.

    Of n = G responses, these are the m with the greatest reward variance. Generation is cheap if many responses are
    made at once, but the update costs each of them alike. Mean and deviation of the advantages are over the m *kept*
    responses, as in the authors' code. The others are dropped.

    With m = 0 a fourth of G is kept, but at least 2, as in the paper's runs (16 of 64, 32 of 128). Set
    `--adapt.batch_size` to `--rollout.batch_size` times m / G, which is the room that the kept responses need. The
    learning-rate schedule counts full batches. With `--train.batch_size` as `--rollout.batch_size` times m, a batch is
    one optimizer step.

    Deviations: the authors divide by the sample deviation + 1e-4, and Eq. 2 by the population deviation. Their loss is
    the mean over responses (`--actor.loss_agg_mode seq-mean-token-mean`). They compare variances as float32, which may
    decide between equal ones; here they are exact.

    Args:
        keep: m, from 2 to G, or 0.
    """

    USE = "Use it if an update costs much more than generating."
    SOURCE = "arXiv 2504.13818"

    keep: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep and not 2 <= self.keep <= self.group_size:
            raise ValueError(f"keep is {self.keep}; it must be from 2 to {self.group_size}, the size of a group, or 0")
        self.kept = self.keep or max(self.group_size // 4, 2)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """Only X1: of each fresh group that the filter keeps, the responses whose rewards differ most."""
        keeps = self.keeps(fresh)
        parts = [
            group.keep(most_varied(group.rewards, self.kept), relative_to="kept") if passed else group
            for group, passed in zip(fresh, keeps, strict=True)
        ]
        return fill(self.max_responses, parts, keeps)


def most_varied(rewards: Sequence[Fraction], size: int) -> list[int]:
    """Positions of the `size` rewards with the greatest variance, in order: the i highest and the `size` - i lowest.

    Of equal variances, the first one in the authors' order is taken: i = `size`, then 0, 1, and so on.
    """
    ranked = sorted(range(len(rewards)), key=rewards.__getitem__)
    lows = [0, *range(size, 0, -1)]
    choices = [ranked[:low] + ranked[len(ranked) - (size - low) :] for low in lows]

    def spread(choice: Iterable[int]) -> Fraction:
        choice_rewards = [rewards[position] for position in choice]
        return size * exact_sum([reward * reward for reward in choice_rewards]) - exact_sum(choice_rewards) ** 2

    best: list[int] = max(choices, key=spread)
    return sorted(best)

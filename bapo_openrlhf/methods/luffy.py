"""LUFFY: each group has a demonstration beside the policy's own responses (arXiv 2504.14945).

Paper: "Learning to Reason under Off-Policy Guidance". The loss is that of its authors' code (ElliottYan/LUFFY, file
mix_core_alg.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapo_openrlhf.adapt.batch import Batch, Demonstration, fill
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.methods.base import FilteredMethod


@dataclass(eq=False, kw_only=True)
class LUFFY(FilteredMethod):
    """Gives each group a worked solution beside the policy's own responses.

    It is GRPO on mixed groups: G - 1 responses of the policy, and the worked solution of the prompt, which has the
    greatest reward of the task. Mean and deviation of the advantages (Eq. 2) are over all G rewards, so a group of
    G - 1 wrong responses has a signal. The loss of the solution's tokens is that of `adapt.corrections.shaped`, with
    gamma = 0.1 and without a clip. All tokens count alike in the mean.

    A prompt without a solution also gets G - 1 responses, because their number is decided before anything is known of
    the prompt.

    Deviations: nobody judges the solution. One that is longer than a response may be is left out; the authors cut it.
    Their script subtracts the mean and does not divide by the deviation (`--algo.advantage.estimator dr_grpo`), takes
    the clip from the policy's own tokens (`--actor.eps_clip_low_high 1 100000000`), divides the summed loss of a batch
    by the greatest length of a response, which is not here, and has no KL term.
    """

    USE = "Use it if the data has worked solutions, and the model solves few prompts by itself."
    SOURCE = "arXiv 2504.14945"
    asynchronous = False  # a group of G - 1 responses comes in one stage of its own
    related_to_generated = True
    adds_rewards = True
    demonstrates = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first_responses = self.group_size - 1

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: mixed groups that the filter keeps. X4: their worked solutions."""
        demonstrations = {group.uid: Demonstration.of(group) for group in fresh if group.prompt.id in self.solutions}
        groups = [
            replace(group, generated=demonstrations[group.uid].rewards) if group.uid in demonstrations else group
            for group in fresh
        ]
        batch = fill(self.capacity * (self.group_size - 1), groups, self.keeps(groups))
        batch.demonstrations = [demonstrations[group.uid] for group in batch.fresh if group.uid in demonstrations]
        return batch

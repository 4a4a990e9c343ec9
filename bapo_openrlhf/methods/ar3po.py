"""AR3PO: hard prompts get more responses, and a stored success helps where all fail (arXiv 2509.25808).

Paper: "Improving Sampling Efficiency in RLVR through Adaptive Rollout and Response Reuse". The rules are those of its
abstract and of summaries, because neither its code nor its full text was found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from bapo_openrlhf.adapt.group import Group, Response
from bapo_openrlhf.methods.base import option
from bapo_openrlhf.methods.stored_successes import StoredSuccesses


@dataclass(eq=False, kw_only=True)
class AR3PO(StoredSuccesses):
    """Generates more responses for prompts that are not solved yet, and reuses a stored success if all fail.

    Responses come in stages, and a prompt leaves as soon as one of its responses is right. In each stage, every prompt
    without a success gets G / `stages` responses. So a prompt has between G / `stages` and G of them, and an easy one
    costs little. If all G fail and a success of the prompt is stored, one of them is *reused*: it takes the place of
    the first response in mean and deviation of the advantages, which are over the group as it is then. In the variant
    that the paper found better, no gradient goes through the stored response, so it is not trained on. With
    `train_reused` it is.

    Deviations: the number of stages, the bound of the store and the choice of the response that gives way are not known
    from the sources. Here they are 2, the last 8 successes, and the first response. A reused response that is trained
    on keeps its stored log-probs; the authors compute them again with today's policy.

    Args:
        stages: S, from 1 to G, a divisor of G.
        train_reused: Whether a reused response is trained on.
    """

    USE = "Use it if generating costs most, and easy and hard prompts are mixed."
    SOURCE = "arXiv 2509.25808"
    asynchronous = False  # the next stage needs the rewards of the one before
    related_to_generated = True

    success_above: Fraction = option(Fraction(1, 2), "in [0, 1)")
    stages: int = 2
    train_reused: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages < 1 or self.group_size % self.stages:
            raise ValueError(f"stages is {self.stages}; it must be a divisor of {self.group_size}, the size of a group")
        self.first_responses = self.group_size // self.stages

    def more_responses(self, rewards: Sequence[Sequence[Fraction]]) -> list[int]:
        """The responses of one more stage for each prompt that has no success and fewer than G responses."""
        stage = self.group_size // self.stages
        return [
            stage * (len(group_rewards) < self.group_size and max(group_rewards) <= self.success_above)
            for group_rewards in rewards
        ]

    def has_failed(self, group: Group) -> bool:
        """Whether no response of the group is a success."""
        return all(reward <= self.success_above for reward in group.rewards)

    def help(self, group: Group, stored: Response) -> Group:
        """The group with a stored success in its mean and deviation, and in the batch only with `train_reused`."""
        if self.train_reused:
            return super().help(group, stored)
        rest = group.keep(range(1, group.size), relative_to="generated")
        return replace(rest, generated=(stored.reward, *group.generated[1:]))

"""Dynamic filtering with batch adaptation: a step generates for more prompts while too few groups have a signal (DAPO).

OpenRLHF's dynamic filtering draws a new prompt for each dropped group as soon as its responses are there, and forgets
the group. Here a step draws in whole rounds, each as large as the first, in the order of the data and from the same
weights. So the prompts of a step follow from its rewards and not from which response came first. The method gets the
groups of all rounds, also those without a signal, and each of them counts.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.filters import informative
from bapo_openrlhf.adapt.rewards import exact_rewards
from bapo_openrlhf.adapt.schedule import ROUNDS
from bapo_openrlhf.training.trainer.generated import is_usable, rewards_of
from bapo_openrlhf.training.trainer.rollout import AdaptedSamplesGenerator, Draft, Round, Samples
from bapo_openrlhf.training.trainer.samples import by_request


class RefillingSamplesGenerator(AdaptedSamplesGenerator):
    """The generator of a run with dynamic filtering.

    After `ROUNDS` rounds, or at the end of an epoch's data, the step goes on with what it has.

    Args:
        prompts: Number of prompts of a round. The method says how many groups with a signal it wants of a step.
        between: A group has a signal if its mean reward is between these (`informative`).
    """

    def __init__(self, *, prompts: int, between: tuple[Fraction, Fraction], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prompts, self.between = prompts, between

    def _generate_fresh(self, dataloader_iter: Any, num_prompts: int, *, draft: Draft, **kwargs: Any) -> Round:
        """The samples of the first round. The draft gets those of the others."""
        kwargs["dynamic_filtering"] = False  # OpenRLHF's own
        generate = partial(super()._generate_fresh, dataloader_iter, num_prompts, draft=draft, **kwargs)
        wanted = self.method.wanted(draft.step, self.prompts)
        samples, drawn, exhausted = generate()
        rounds, found = int(bool(samples)), len(self._informative(samples))
        while found < wanted and rounds < ROUNDS and not exhausted:
            more, also_drawn, exhausted = generate()
            draft.samples += more
            drawn, rounds, found = drawn + also_drawn, rounds + bool(more), found + len(self._informative(more))
        draft.rollout.numbers |= {"prompts/rounds": rounds, "groups/wanted": wanted}
        return samples, drawn, exhausted

    def _informative(self, samples: Sequence[Experience]) -> list[Sequence[Experience]]:
        """The groups with a signal, from samples in the order of their requests."""
        usable = (members for members in by_request(samples) if all(map(is_usable, members)))
        return [
            members
            for members in usable
            if informative(exact_rewards(rewards_of(members), self.reward_range), self.between)
        ]

    def _generate_rollout(self, draft: Draft, **kwargs: Any) -> Samples:
        """The samples of all rounds, and the responses of groups with a signal for each 100 prompts drawn."""
        samples, rate, drawn, exhausted = super()._generate_rollout(draft, **kwargs)
        kept = sum(map(len, self._informative(samples)))
        return samples, 100 * kept / drawn if drawn else rate, drawn, exhausted

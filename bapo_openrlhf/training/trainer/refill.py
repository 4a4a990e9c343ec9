"""Dynamic filtering with batch adaptation: a step generates for more prompts while too few groups have a signal (DAPO).

OpenRLHF's dynamic filtering draws a new prompt for each dropped group as soon as its responses are there, and forgets
the group. Here a step draws in whole rounds, each as large as the first, in the order of the data and from the same
weights. So the prompts of a step follow from its rewards and not from which response came first. The method gets the
groups of all rounds, also those without a signal, and each of them counts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.adapt.schedule import ROUNDS
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.trainer.generated import is_usable, rewards_of
from bapo_openrlhf.training.trainer.rollout import AdaptedSamplesGenerator, Samples
from bapo_openrlhf.training.trainer.samples import by_request


class RefillingSamplesGenerator(AdaptedSamplesGenerator):
    """The generator of a run with dynamic filtering.

    After `ROUNDS` rounds, or at the end of an epoch's data, the step goes on with what it has.

    Args:
        wanted: Called before the first round of a step. Returns how many of its groups should have a signal.
        informative: Whether a group with these rewards has a signal.
    """

    def __init__(
        self, *, wanted: Callable[[], int], informative: Callable[[Sequence[float]], bool], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.wanted, self.informative = wanted, informative
        self._more: list[Experience] = []  # samples of the rounds after the first
        self._kept = 0  # responses of groups with a signal
        self._numbers_of_step: dict[str, float] = {}

    def _generate_prompts(
        self, dataloader_iter: Any, num_prompts: int, **kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        """The samples of the first round. Those of the others wait in `_more`, because OpenRLHF expects no more."""
        kwargs["dynamic_filtering"] = False  # OpenRLHF's own
        generate = partial(super()._generate_prompts, dataloader_iter, num_prompts, **kwargs)
        if self._kind != "fresh":
            return generate()
        wanted = self.wanted()
        samples, drawn, exhausted = generate()
        self._more, rounds, informative = [], int(bool(samples)), self._informative(samples)
        while len(informative) < wanted and rounds < ROUNDS and not exhausted:
            more, also_drawn, exhausted = generate()
            self._more += more
            drawn, rounds, informative = drawn + also_drawn, rounds + bool(more), informative + self._informative(more)
        self._kept = sum(map(len, informative))
        self._numbers_of_step = {"prompts/rounds": rounds, "groups/wanted": wanted}
        return samples, drawn, exhausted

    def _informative(self, samples: Sequence[Experience]) -> list[Sequence[Experience]]:
        """The groups with a signal, from samples in the order of their requests."""
        usable = (members for members in by_request(samples) if all(map(is_usable, members)))
        return [members for members in usable if self.informative(rewards_of(members))]

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Samples:
        """The samples of all rounds, and the responses of groups with a signal for each 100 prompts drawn."""
        samples, rate, drawn, exhausted = super().generate_samples(**kwargs)
        return [*samples, *self._more], 100 * self._kept / drawn if drawn else rate, drawn, exhausted

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step for the log."""
        return super().metrics() | self._numbers_of_step

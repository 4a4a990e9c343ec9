"""Dynamic filtering with batch adaptation: a step generates for more prompts while too few groups have a signal (DAPO).

OpenRLHF's dynamic filtering draws a new prompt for each dropped group as soon as its responses are there, and forgets
the group. Here a step draws in whole rounds, from the same weights, so its prompts follow from its rewards and not from
which response came first. The method gets the groups of all rounds, also those without a signal.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from bapo_openrlhf.adapt.filters import informative
from bapo_openrlhf.adapt.rewards import exact_rewards
from bapo_openrlhf.adapt.schedule import ROUNDS
from bapo_openrlhf.training.trainer.ask import Ask
from bapo_openrlhf.training.trainer.fresh import OneRound
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.samples import Answers


class Rounds(OneRound):
    """Asks for fresh prompts in up to `ROUNDS` rounds. A group with a mean reward `between` these has a signal."""

    def __init__(self, *args: Any, between: tuple[Fraction, Fraction]) -> None:
        super().__init__(*args)
        self.between = between

    def generate(self, rollout: Rollout, ask: Ask, send_hard: Callable[[], None]) -> None:
        """Generate the fresh groups of all rounds."""
        wanted, rounds = self.method.wanted(rollout.step, self.size), 0
        while True:
            before = len(rollout.fresh)
            super().generate(rollout, ask, send_hard)
            rounds += len(rollout.fresh) > before
            signals = list(filter(self._informative, rollout.fresh))
            if len(signals) >= wanted or rounds == ROUNDS or self.prompts.epoch_done:
                break
        rollout.numbers |= {"prompts/rounds": rounds, "groups/wanted": wanted}
        kept = sum(len(each.responses) for each in signals)
        rollout.pass_rate = 100 * kept / rollout.drawn if rollout.drawn else None

    def _informative(self, answers: Answers) -> bool:
        """Whether a group has a signal."""
        return answers.usable and informative(exact_rewards(answers.rewards, self.reward_range), self.between)

"""The fresh prompts of a rollout: which are drawn, and how many responses each of them gets.

With dynamic filtering (DAPO), a step generates for more prompts while too few groups have a signal (`Rounds`).
"""

import itertools
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.adapt.filters import informative
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.rewards import UNIT, exact_rewards
from bapo_openrlhf.adapt.schedule import ROUNDS
from bapo_openrlhf.methods.base import Method, are_positions
from bapo_openrlhf.training.trainer.engine_calls import Ask, SentPrompt
from bapo_openrlhf.training.trainer.prompts import TrainingPrompts
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.samples import Answers


class OneRound:
    """A rollout asks for its fresh prompts once."""

    def __init__(self, args: SimpleNamespace, method: Method, prompts: TrainingPrompts) -> None:
        self.args, self.method, self.prompts = args, method, prompts
        self.size, self.reward_range = args.rollout.batch_size, args.adapt.rewards() or UNIT

    def generate(self, rollout: Rollout, ask: Ask, send_hard: Callable[[], None]) -> None:
        """Generate the fresh groups of a rollout. `send_hard` is called as soon as the fresh prompts are sent."""
        first, prompts = len(rollout.fresh), self._draw(rollout)
        sent = ask.send("fresh", prompts, size=self.method.first_responses)
        if sent:
            send_hard()
        rollout.fresh += ask.answers(sent)
        if self.method.first_responses is not None:
            self._generate_more(rollout.fresh[first:], first, ask)

    def _draw(self, rollout: Rollout) -> list[Prompt]:
        """The next prompts of the data. A method may choose them among more; ValueError if its positions are wrong."""
        drawn = self.prompts.draw(self.size * self.method.candidates)
        rollout.drawn += len(drawn)
        count = min(self.size, len(drawn))
        if len(drawn) == count:  # otherwise there are candidates, and the data does not end here
            return drawn
        chosen = list(self.method.choose_prompts(rollout.step, drawn, count))
        if not are_positions(chosen, count, len(drawn)):
            raise ValueError(
                f"{count} of {len(drawn)} prompts were to be chosen, each once; the positions are {chosen}"
            )
        rollout.passed_over += len(drawn) - count
        return [drawn[place] for place in chosen]

    def _generate_more(self, answers: list[Answers], first: int, ask: Ask) -> None:
        """Add the responses for which the method asks, in stages. `first` is the number of the first prompt."""
        most = self.args.rollout.n_samples_per_prompt
        for stage in itertools.count(1):
            rated_answers = [(number, each) for number, each in enumerate(answers, first) if each.judged]
            rewards = [exact_rewards(each.rewards, self.reward_range) for _, each in rated_answers]
            counts = list(self.method.more_responses(rewards))
            sizes = [len(row) + count for row, count in zip(rewards, counts, strict=True)]
            if max(sizes, default=0) > most or min(counts, default=0) < 0:
                raise ValueError(f"groups of {sizes} responses were asked for; each may have at most {most}")
            if not any(counts):
                return
            order, sent = list[Answers](), list[SentPrompt]()
            for count in sorted(set(counts) - {0}):
                pairs = [pair for pair, pair_count in zip(rated_answers, counts, strict=True) if pair_count == count]
                numbers, prompts = [number for number, _ in pairs], [each.prompt for _, each in pairs]
                order += [each for _, each in pairs]
                sent += ask.send(f"fresh {stage}", prompts, numbers=numbers, size=count)
            for each, addition in zip(order, ask.answers(sent), strict=True):
                each.responses += addition.responses

    def unfinished(self) -> list[dict[str, Any]]:
        """The groups in flight that go on in the next step, as plain data; here there are none."""
        return []


class Rounds(OneRound):
    """Asks for fresh prompts in up to `ROUNDS` rounds. A group with a mean reward `between` these has a signal.

    OpenRLHF's dynamic filtering draws a new prompt for each dropped group as soon as its responses are there, and
    forgets the group. Here a step draws in whole rounds, from the same weights, so its prompts follow from its rewards
    and not from which response came first. The method gets the groups of all rounds, also those without a signal.
    """

    def __init__(self, *args: Any, between: tuple[Fraction, Fraction]) -> None:
        super().__init__(*args)
        self.between = between

    def generate(self, rollout: Rollout, ask: Ask, send_hard: Callable[[], None]) -> None:
        """Generate the fresh groups of all rounds."""
        target, rounds = self.method.wanted(rollout.step, self.size), 0
        while True:
            before = len(rollout.fresh)
            super().generate(rollout, ask, send_hard)
            rounds += len(rollout.fresh) > before
            signals = list(filter(self._informative, rollout.fresh))
            if len(signals) >= target or rounds == ROUNDS or self.prompts.epoch_done:
                break
        rollout.numbers |= {"prompts/rounds": rounds, "groups/wanted": target}
        kept = sum(len(each.responses) for each in signals)
        rollout.pass_rate = 100 * kept / rollout.drawn if rollout.drawn else None

    def _informative(self, answers: Answers) -> bool:
        """Whether a group has a signal."""
        return answers.usable and informative(exact_rewards(answers.rewards, self.reward_range), self.between)

"""Partial rollouts (Kimi k1.5, arXiv 2501.12599, Sec. 2.6.2): a long response goes on in the next step.

A response stops after N tokens, so no step waits for its longest one. It is asked for again with its prompt and its
tokens so far, a seed of its own, and the weights that the engines hold then. Each token keeps the log-prob of the
weights that sampled it. A group reaches the trainer when all of its responses are finished.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bapo_openrlhf.adapt.group import Response
from bapo_openrlhf.training.trainer.engine_calls import Ask
from bapo_openrlhf.training.trainer.fresh import OneRound
from bapo_openrlhf.training.trainer.generated import check_versions
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.samples import Answers
from bapo_openrlhf.training.wire.responses import STOPPED, Prefix


def put(answers: Answers, place: int, response: Response, version: int) -> None:
    """Put a response that weights of this version went on with in the place of what it was before.

    Raises:
        RuntimeError: The response says that other weights generated what is new.
    """
    check_versions(Answers(answers.prompt, [response]), version)
    segments = list(answers.responses[place].segments)
    new = len(response.log_probs) - sum(tokens for _, tokens in segments)
    if segments and segments[-1][0] == version:
        new += segments.pop()[1]
    segments.append((version, new))
    oldest = segments[0][0]
    answers.responses[place] = replace(response, weights_version=oldest, segments=tuple(segments))


def stopped_in(answers: Answers) -> list[int]:
    """Places of the responses that are not finished."""
    return [place for place, response in enumerate(answers.responses) if STOPPED in response.extras["info"]]


def prefix_of(response: Response) -> Prefix:
    """The generated tokens of a response so far, and their log-probs."""
    ((start, end),) = response.action_spans
    return Prefix(response.token_ids[start:end], response.log_probs)


class InParts(OneRound):
    """A rollout goes on with the responses that have stopped, and begins new ones.

    Only responses to fresh prompts stop. As long as no group of a step is complete, the step draws more prompts, and
    all responses go on with the same weights. When the data of an epoch ends, all responses run to their end.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.in_flight = list[Answers]()

    def generate(self, rollout: Rollout, ask: Ask, send_hard: Callable[[], None]) -> None:
        """Generate until a group is complete. The rollout gets those that are."""
        continued = 0
        for again in itertools.count():
            continued += self._go_on(f"continued {again}", rollout, ask, send_hard)
            rollout.fresh = [answers for answers in self.in_flight if not stopped_in(answers)]
            if rollout.fresh or self.prompts.epoch_done:
                break
        self.in_flight = list(filter(stopped_in, self.in_flight))
        mixed = [len(response.segments) > 1 for answers in rollout.fresh for response in answers.responses]
        rollout.numbers |= {
            "groups/in_flight": len(self.in_flight),
            "responses/continued": continued,
            "responses/mixed_share": sum(mixed) / max(len(mixed), 1),
        }

    def _go_on(self, kind: str, rollout: Rollout, ask: Ask, send_hard: Callable[[], None]) -> int:
        """Up to N tokens more of each stopped response, whose number is returned, and of those to the next prompts."""
        prompts, version = self.prompts.draw(self.size), rollout.weights_version
        rollout.drawn += len(prompts)
        limit = {"budget": None if self.prompts.epoch_done else self.args.adapt.partial_rollout_tokens}
        stopped_places = [(answers, place) for answers in self.in_flight for place in stopped_in(answers)]
        extras = [{"prefix": prefix_of(answers.responses[place]), **limit} for answers, place in stopped_places]
        stopped_sent = ask.send(kind, [answers.prompt for answers, _ in stopped_places], size=1, extras=extras)
        fresh_sent = ask.send("fresh", prompts, extras=itertools.repeat(limit))
        if fresh_sent or self.in_flight:  # a step without new prompts may have hard ones
            send_hard()
        fresh = ask.answers([*fresh_sent, *stopped_sent])
        for (answers, place), answer in zip(stopped_places, fresh[len(fresh_sent) :], strict=True):
            put(answers, place, answer.responses[0], version)
        for answers in fresh[: len(fresh_sent)]:
            for place, response in enumerate(answers.responses):
                put(answers, place, response, version)
        self.in_flight += fresh[: len(fresh_sent)]
        return len(stopped_places)

    def unfinished(self) -> list[dict[str, Any]]:
        """The answers in flight, as plain data."""
        return [answers.state_dict() for answers in self.in_flight]

    def take_unfinished(self, state: Sequence[dict[str, Any]]) -> None:
        """Go on with answers that another run left in flight."""
        self.in_flight = list(map(Answers.from_state, state))

"""The fresh prompts of a rollout: which are drawn, how they are asked for, and how many responses each of them gets."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.adapt.filters import informative
from bapo_openrlhf.adapt.group import Prompt, Response
from bapo_openrlhf.adapt.rewards import UNIT, exact_rewards
from bapo_openrlhf.adapt.schedule import ROUNDS
from bapo_openrlhf.methods.base import Method, are_positions
from bapo_openrlhf.training.trainer.engine_calls import Ask, SentPrompt
from bapo_openrlhf.training.trainer.generated import check_versions
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.samples import Answers
from bapo_openrlhf.training.wire.responses import STOPPED, Prefix


def prompts_of(batches: Iterable[Any]) -> Iterator[Prompt]:
    """The prompts of one of OpenRLHF's data loaders, which are made with one prompt in each batch."""
    for _, (text,), (label,), (images,) in batches:
        yield Prompt(text, label, images or None)


class TrainingPrompts:
    """Draws the prompts of the training data in order. It takes the place of OpenRLHF's data loader.

    One thread may draw while another one asks for the position. Without the lock both could create the loader's
    iterator, and a resumed run could then start its data from the beginning.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._turn = loader, threading.Lock()
        self._epoch: Iterator[Prompt] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def epoch_done(self) -> bool:
        """Whether the end of the data was seen. The next prompts then belong to another epoch."""
        return self._epoch is None

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts of an epoch. There are fewer at its end, and only then."""
        with self._turn:
            if self._epoch is None:
                self._epoch = prompts_of(iter(self._loader))
            prompts = list(itertools.islice(self._epoch, count))
            self._epoch = self._epoch if len(prompts) == count else None
            return prompts

    def state_dict(self) -> dict[str, Any]:
        """The loader's position."""
        with self._turn:
            return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        with self._turn:
            self._loader.load_state_dict(state)


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
    """Dynamic filtering (DAPO): asks for more fresh prompts, in up to `ROUNDS` rounds, while too few have a signal.

    A group with a mean reward `between` these has a signal. OpenRLHF's dynamic filtering draws a new prompt for each
    dropped group as soon as its responses are there, and forgets the group. Here a step draws in whole rounds, from the
    same weights, so its prompts follow from its rewards and not from which response came first. The method gets the
    groups of all rounds, also those without a signal.
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


class InParts(OneRound):
    """Partial rollouts (Kimi k1.5, arXiv 2501.12599, Sec. 2.6.2): a long response goes on in the next step.

    A response stops after N tokens, so no step waits for its longest one. It is asked for again with its prompt and its
    tokens so far, a seed of its own, and the weights that the engines hold then. Each token keeps the log-prob of the
    weights that sampled it. A group reaches the trainer when all of its responses are finished.

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

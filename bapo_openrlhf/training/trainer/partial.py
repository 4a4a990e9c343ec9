"""Partial rollouts (Kimi k1.5, arXiv 2501.12599, Sec. 2.6.2): a long response goes on in the next step.

A response stops after N tokens, so no step waits for its longest one. A response that has stopped is asked for again
with its prompt and its tokens so far, a seed of its own, and the weights that the engines hold then. Each token keeps
the log-prob of the weights that sampled it. A group reaches the trainer when all of its responses are finished. Until
then it is in flight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Self

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer.ahead import AheadSamplesGenerator
from bapo_openrlhf.training.trainer.generated import check_versions
from bapo_openrlhf.training.trainer.rollout import AdaptedSamplesGenerator, Rollout, Samples
from bapo_openrlhf.training.trainer.samples import by_request, prompt_of
from bapo_openrlhf.training.wire.responses import SEGMENTS, STOPPED, Prefix


@dataclass
class GroupInFlight:
    """A group of which a response may be unfinished.

    Attributes:
        samples: Its responses so far. One that has stopped says so in its `info`, and has no reward.
        segments: For each response its parts in order: the version of the weights, and the number of their tokens.
    """

    samples: list[Experience]
    segments: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, samples: Sequence[Experience], version: int) -> Self:
        """The group of samples that weights of this version began."""
        group = cls(list(samples), [[] for _ in samples])
        for place, sample in enumerate(samples):
            group.put(place, sample, version)
        return group

    def put(self, place: int, sample: Experience, version: int) -> None:
        """Put a longer response in the place of one that had stopped.

        Raises:
            RuntimeError: The response says that other weights generated what is new.
        """
        check_versions([sample], version)
        segments = self.segments[place]
        new = int(sample.action_mask.sum()) - sum(tokens for _, tokens in segments)
        if segments and segments[-1][0] == version:
            new += segments.pop()[1]
        segments.append((version, new))
        self.samples[place] = sample

    @property
    def stopped(self) -> list[int]:
        """Places of the responses that are not finished."""
        return [place for place, sample in enumerate(self.samples) if STOPPED in sample.info]

    def finished(self, number: int) -> list[Experience]:
        """Its samples once all are finished: each with its segments, int64 of shape (segments, 2), and a new number."""
        for sample, segments in zip(self.samples, self.segments, strict=True):
            sample.index, sample.info[SEGMENTS] = [number], torch.tensor(segments)
        return self.samples

    def state_dict(self) -> dict[str, Any]:
        """The group as plain data and tensors. `from_state` is the inverse."""
        return {"samples": list(map(vars, self.samples)), "segments": [list(map(list, s)) for s in self.segments]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Inverse of `state_dict`."""
        segments = [[(version, tokens) for version, tokens in parts] for parts in state["segments"]]
        return cls([Experience(**sample) for sample in state["samples"]], segments)


def prefix_of(sample: Experience) -> Prefix:
    """The generated tokens of a response so far, and their log-probs."""
    mask = sample.action_mask[0].bool()
    return Prefix(sample.sequences[0][1:][mask].int().numpy(), sample.rollout_log_probs[0][mask].numpy())


class PartialSamplesGenerator(AdaptedSamplesGenerator):
    """The generator of a run with partial rollouts.

    Only responses to fresh prompts stop. Hard prompts are generated again from today's weights, from the beginning to
    the end. As long as no group of a step is complete, the step draws more prompts, and all responses go on with the
    same weights. When the data of an epoch ends, all responses run to their end.

    Args:
        budget: N, tokens of a response in one step.
    """

    def __init__(self, *, budget: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.budget, self.groups_in_flight = budget, list[GroupInFlight]()
        self._limit: int | None = None  # the budget, unless the data of the epoch has ended
        self._prefixes: Iterator[Prefix] | None = None  # of the responses that are asked for again now
        self._version, self._again = 0, 0
        self._complete: list[GroupInFlight] = []

    def _next_number(self) -> dict[str, Any]:
        """The next request's number and seed, the tokens that it has already, and how many it may generate now."""
        request = super()._next_number()
        if self._prefixes is not None:
            return request | {"budget": self._limit, "prefix": next(self._prefixes)}
        return request | ({"budget": self._limit} if self._kind == "fresh" else {})

    def _ask_again(self, kind: str, **kwargs: Any) -> Callable[[], None]:
        """Ask for the rest of each response that has stopped. The result waits for what comes, and puts it in place."""
        stopped = [(group, place) for group in self.groups_in_flight for place in group.stopped]
        samples = [group.samples[place] for group, place in stopped]
        self._again += len(stopped)
        self._prefixes = map(prefix_of, samples)
        refs = self._dispatch_hard_prompts(
            [prompt_of(sample) for sample in samples], kind, **kwargs | {"n_samples_per_prompt": 1}
        )
        self._prefixes = None

        def collect() -> None:
            for (group, place), sample in zip(stopped, self._collect(refs, **kwargs), strict=True):
                group.put(place, sample, self._version)

        return collect

    def _generate_prompts(
        self, dataloader_iter: Any, num_prompts: int, **kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        """Go on with what has stopped, and begin new responses. The complete groups wait in `_complete`."""
        if self._kind != "fresh":
            return super()._generate_prompts(dataloader_iter, num_prompts, **kwargs)
        consumed, exhausted = 0, False
        for again in count():
            drawn, exhausted = self._go_on(dataloader_iter, num_prompts, f"continued {again}", **kwargs)
            consumed += drawn
            complete = [group for group in self.groups_in_flight if not group.stopped]
            if complete or exhausted:
                break
        self.groups_in_flight = [group for group in self.groups_in_flight if group.stopped]
        self._complete = complete
        return [], consumed, exhausted  # OpenRLHF expects no more than a rollout batch

    def _go_on(self, dataloader_iter: Any, num_prompts: int, kind: str, **kwargs: Any) -> tuple[int, bool]:
        """Up to N tokens more of each response in flight, and of those to the next prompts.

        Returns:
            The number of prompts that were drawn, and whether the data has ended. If so, all responses are finished.
        """
        *columns, ended = _collect_prompt_batch(dataloader_iter, num_prompts)
        self._limit = None if ended else self.budget
        collect = self._ask_again(kind, **kwargs)
        drawn = iter([(None, *([part] for part in row)) for row in zip(*columns, strict=True)])
        if not columns[0] and self.groups_in_flight:
            self._dispatch_prompts_to_vllm([], [], **kwargs)  # the step has no new prompts, and may have hard ones
        samples, consumed, exhausted = super()._generate_prompts(drawn, num_prompts, **kwargs)
        collect()
        self.groups_in_flight += [GroupInFlight.of(members, self._version) for members in by_request(samples)]
        return consumed, exhausted

    def _generate_rollout(
        self, step: int, weights_version: int, hard_prompts: Callable[[], Sequence[Prompt]], **kwargs: Any
    ) -> tuple[Samples, Rollout]:
        """The samples of the groups that are complete, and what else there is of the rollout."""
        self._version, self._again, self._complete = weights_version, 0, []
        (_, *rest), rollout = super()._generate_rollout(step, weights_version, hard_prompts, **kwargs)
        samples = list(chain(*(group.finished(number) for number, group in enumerate(self._complete))))
        mixed = sum(len(sample.info[SEGMENTS]) > 1 for sample in samples)
        numbers = {
            "groups/in_flight": len(self.groups_in_flight),
            "responses/continued": self._again,
            "responses/mixed_share": mixed / max(len(samples), 1),
        }
        asked = len(self._complete) + len(by_request(rollout.hard_samples))
        return (samples, *rest), replace(rollout, asked=asked, numbers=numbers)

    def unfinished(self) -> list[dict[str, Any]]:
        """The groups in flight, as plain data and tensors."""
        return [group.state_dict() for group in self.groups_in_flight]

    def take_unfinished(self, state: Sequence[dict[str, Any]]) -> None:
        """Go on with groups that another run left in flight."""
        self.groups_in_flight = list(map(GroupInFlight.from_state, state))


class PartialAheadSamplesGenerator(PartialSamplesGenerator, AheadSamplesGenerator):
    """The generator of a run with partial rollouts whose generation is ahead of training.

    A response that stops in a rollout goes on in the next one.
    """

    @property
    def in_flight(self) -> int:
        """Number of groups that were begun and have not reached the trainer yet."""
        last = [self.rollout, *self.there][-1]
        return super().in_flight + int(last.numbers.get("groups/in_flight", 0))

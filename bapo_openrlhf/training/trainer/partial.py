"""Partial rollouts (Kimi k1.5, arXiv 2501.12599, Sec. 2.6.2): a long response goes on in the next step.

A response stops after N tokens, so no step waits for its longest one. A response that has stopped is asked for again
with its prompt and its tokens so far, a seed of its own, and the weights that the engines hold then. Each token keeps
the log-prob of the weights that sampled it. A group reaches the trainer when all of its responses are finished. Until
then it is in flight.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch

from bapo_openrlhf.training.trainer.ahead import AheadSamplesGenerator
from bapo_openrlhf.training.trainer.ask import Ask
from bapo_openrlhf.training.trainer.generated import check_versions
from bapo_openrlhf.training.trainer.rollout import AdaptedSamplesGenerator, Draft, Round
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

    def _generate_fresh(self, dataloader_iter: Any, num_prompts: int, *, draft: Draft, **kwargs: Any) -> Round:
        """Go on with what has stopped, and begin new responses. The draft gets the samples of the complete groups."""
        consumed, continued = 0, 0
        for again in itertools.count():
            stopped = [(group, place) for group in self.groups_in_flight for place in group.stopped]
            options = {"stopped": stopped, "kind": f"continued {again}", "draft": draft, **kwargs}
            drawn, exhausted = self._go_on(dataloader_iter, num_prompts, **options)
            consumed, continued = consumed + drawn, continued + len(stopped)
            complete = [group for group in self.groups_in_flight if not group.stopped]
            if complete or exhausted:
                break
        self.groups_in_flight = [group for group in self.groups_in_flight if group.stopped]
        draft.samples = [sample for number, group in enumerate(complete) for sample in group.finished(number)]
        mixed = sum(len(sample.info[SEGMENTS]) > 1 for sample in draft.samples)
        draft.rollout.numbers |= {
            "groups/in_flight": len(self.groups_in_flight),
            "responses/continued": continued,
            "responses/mixed_share": mixed / max(len(draft.samples), 1),
        }
        return [], consumed, exhausted

    def _go_on(
        self,
        dataloader_iter: Any,
        num_prompts: int,
        *,
        stopped: Sequence[tuple[GroupInFlight, int]],
        kind: str,
        ask: Ask,
        draft: Draft,
        **kwargs: Any,
    ) -> tuple[int, bool]:
        """Up to N tokens more of each response that has stopped, and of those to the next prompts.

        Args:
            dataloader_iter, num_prompts, kwargs: As in OpenRLHF's `_generate_vllm`.
            stopped: Groups and the places of their responses that have stopped.
            kind: Kind of the requests for these responses.
            ask: What the next prompts are asked for as.
            draft: The rollout.

        Returns:
            The number of prompts that were drawn, and whether the data has ended. If so, all responses are finished.
        """
        *columns, ended = _collect_prompt_batch(dataloader_iter, num_prompts)
        limit = {"budget": None if ended else self.budget}
        begun = [group.samples[place] for group, place in stopped]
        again = Ask(kind, draft.step, extras=({"prefix": prefix_of(sample), **limit} for sample in begun))
        refs = self._send_prompts(list(map(prompt_of, begun)), **kwargs | {"ask": again, "n_samples_per_prompt": 1})
        options = {"ask": replace(ask, extras=itertools.repeat(limit)), "draft": draft, **kwargs}
        if not columns[0] and self.groups_in_flight:
            self._dispatch_prompts_to_vllm([], [], **options)  # the step has no new prompts, and may have hard ones
        drawn = iter([(None, *([part] for part in row)) for row in zip(*columns, strict=True)])
        samples, consumed, exhausted = super()._generate_fresh(drawn, num_prompts, **options)
        version = draft.rollout.weights_version
        for (group, place), sample in zip(stopped, self._collect(refs, **kwargs), strict=True):
            group.put(place, sample, version)
        self.groups_in_flight += [GroupInFlight.of(members, version) for members in by_request(samples)]
        return consumed, exhausted

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

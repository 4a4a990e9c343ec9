"""Partial rollouts (Kimi k1.5, arXiv 2501.12599, Sec. 2.6.2): a long response goes on in the next step.

A response stops after N tokens, so no step waits for its longest one. A response that has stopped is asked for again
with its prompt and its tokens so far, a seed of its own, and the weights that the engines hold then. Each token keeps
the log-prob of the weights that sampled it. A group reaches the trainer when all of its responses are finished. Until
then it is in flight.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.training.trainer.ask import Ask
from bapo_openrlhf.training.trainer.fresh import OneRound
from bapo_openrlhf.training.trainer.generated import check_versions
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.samples import prompt_of
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

    def finished(self) -> list[Experience]:
        """Its samples once all are finished: each with its segments, int64 of shape (segments, 2)."""
        for sample, segments in zip(self.samples, self.segments, strict=True):
            sample.info[SEGMENTS] = torch.tensor(segments)
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


class InParts(OneRound):
    """A rollout goes on with the responses that have stopped, and begins new ones.

    Only responses to fresh prompts stop. Hard prompts are generated again from today's weights, from the beginning to
    the end. As long as no group of a step is complete, the step draws more prompts, and all responses go on with the
    same weights. When the data of an epoch ends, all responses run to their end.

    Args:
        args, method, prompts: As for one round.

    Attributes:
        groups_in_flight: The groups of which a response may be unfinished.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.groups_in_flight = list[GroupInFlight]()

    def generate(self, rollout: Rollout, ask: Ask, send_hard: Callable[[], None]) -> None:
        """Generate until a group is complete. The rollout gets the samples of the groups that are."""
        continued, complete = 0, list[GroupInFlight]()
        for again in itertools.count():
            continued += self._go_on(f"continued {again}", rollout, ask, send_hard)
            complete = [group for group in self.groups_in_flight if not group.stopped]
            if complete or self.prompts.epoch_done:
                break
        self.groups_in_flight = [group for group in self.groups_in_flight if group.stopped]
        rollout.fresh = [group.finished() for group in complete]
        samples = [sample for group in rollout.fresh for sample in group]
        rollout.numbers |= {
            "groups/in_flight": len(self.groups_in_flight),
            "responses/continued": continued,
            "responses/mixed_share": sum(len(one.info[SEGMENTS]) > 1 for one in samples) / max(len(samples), 1),
        }

    def _go_on(self, kind: str, rollout: Rollout, ask: Ask, send_hard: Callable[[], None]) -> int:
        """Up to N tokens more of each response that has stopped, and of those to the next prompts.

        If the data of the epoch ends here, all responses are finished.

        Args:
            kind: Kind of the requests for the responses that have stopped.
            rollout, ask, send_hard: As in `generate`.

        Returns:
            The number of responses that had stopped.
        """
        prompts, version = self.prompts.draw(self.size), rollout.weights_version
        rollout.drawn += len(prompts)
        limit = {"budget": None if self.prompts.epoch_done else self.args.adapt.partial_rollout_tokens}
        stopped = [(group, place) for group in self.groups_in_flight for place in group.stopped]
        begun = [group.samples[place] for group, place in stopped]
        extras = ({"prefix": prefix_of(sample), **limit} for sample in begun)
        refs = ask.send(kind, list(map(prompt_of, begun)), size=1, extras=extras)
        new = ask.send("fresh", prompts, extras=itertools.repeat(limit))
        if new or self.groups_in_flight:  # a step without new prompts may have hard ones
            send_hard()
        groups = ask.groups([*new, *refs])
        for (group, place), (sample,) in zip(stopped, groups[len(new) :], strict=True):
            group.put(place, sample, version)
        self.groups_in_flight += [GroupInFlight.of(samples, version) for samples in groups[: len(new)]]
        return len(stopped)

    def unfinished(self) -> list[dict[str, Any]]:
        """The groups in flight, as plain data and tensors."""
        return [group.state_dict() for group in self.groups_in_flight]

    def take_unfinished(self, state: Sequence[dict[str, Any]]) -> None:
        """Go on with groups that another run left in flight."""
        self.groups_in_flight = list(map(GroupInFlight.from_state, state))

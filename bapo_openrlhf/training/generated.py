"""What a step generated, as groups: which of them can be used, and what the record says of all of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from typing import Any, Self

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.adapt.group import UNIT, Group, Prompt, Range, Response, exact_reward, exact_sum, mean_reward
from bapo_openrlhf.training.samples import groups_of, in_groups, prompt_of

logger = init_logger(__name__)

WARN_STEPS = 3  # steps that warn of rewards outside the task's range


@dataclass(frozen=True)
class GeneratedGroup:
    """The samples of one prompt.

    Attributes:
        uid: Number of the group. A `Group` of the same samples has the same number.
        source: Either fresh or reevaluated.
        prompt: The prompt.
        samples: Its G samples.
        mean: Exact group mean reward; None if the group cannot be used.
    """

    uid: int
    source: str
    prompt: Prompt
    samples: Sequence[Experience]
    mean: Fraction | None

    @cached_property
    def tokens(self) -> int:
        """Number of generated tokens of all responses."""
        return sum(int(sample.action_mask.sum()) for sample in self.samples)

    def row(self, state: str) -> dict[str, Any]:
        """The group's line of groups.jsonl."""
        return {
            "uid": self.uid,
            "prompt": self.prompt.id,
            "source": self.source,
            "state": state,
            "mean": None if self.mean is None else float(self.mean),
            "responses": len(self.samples),
            "tokens": self.tokens,
        }


@dataclass(frozen=True)
class GeneratedStep:
    """What one step generated.

    Attributes:
        fresh: Fresh groups that can be used.
        reevaluated: Re-evaluated groups that can be used.
        recorded: All groups, also those that cannot be used. The record gets them.
    """

    fresh: list[Group]
    reevaluated: list[Group]
    recorded: list[GeneratedGroup]

    @classmethod
    def of(
        cls,
        fresh: Sequence[Experience],
        reevaluated: Sequence[Experience],
        size: int,
        *,
        first_uid: int,
        step: int,
        policy_step: int,
        reward_range: Range = UNIT,
    ) -> Self:
        """The groups of a step, from OpenRLHF's samples.

        Args:
            fresh: Samples of the fresh prompts, in whole groups.
            reevaluated: Samples of the hard prompts, which today's policy generated.
            size: Number of responses of a group.
            first_uid: Number of the first group.
            step: Trainer step.
            policy_step: Number of updates behind the weights that generated the fresh samples.
            reward_range: The least and the greatest reward of the task.
        """
        groups, recorded = [], []
        for source, samples, policy in (("fresh", fresh, policy_step), ("reevaluated", reevaluated, step)):
            first = first_uid + len(recorded)
            usable = usable_groups(samples, size)
            of_step = {"first_uid": first, "step": step, "policy_step": policy}
            groups.append(groups_of(usable, size, **of_step, reward_range=reward_range))
            recorded += generated_groups(samples, size, source=source, first_uid=first, usable=is_usable)
            for group, record in zip(groups[-1], recorded[first - first_uid :], strict=False):  # these are the usable
                for sample, response in zip(record.samples, group.responses, strict=True):
                    lighten(sample, response)
        return cls(*groups, recorded)

    @property
    def failed(self) -> int:
        """Number of groups that cannot be used."""
        return len(self.recorded) - len(self.fresh) - len(self.reevaluated)


def generated_groups(
    samples: Sequence[Experience],
    size: int,
    *,
    source: str,
    first_uid: int,
    usable: Callable[[Experience], bool],
) -> list[GeneratedGroup]:
    """The samples of one rollout as groups.

    Groups in which every sample is usable come first, and have the numbers that `groups_of` gives them. The others
    come after them.
    """
    chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
    groups = []
    for failed, chunk in sorted(((not all(map(usable, chunk)), chunk) for chunk in chunks), key=itemgetter(0)):
        mean = None if failed else exact_sum([exact_reward(sample.rewards[0]) for sample in chunk]) / len(chunk)
        groups.append(GeneratedGroup(first_uid + len(groups), source, prompt_of(chunk[0]), chunk, mean))
    return groups


def lighten(sample: Experience, response: Response) -> None:
    """Let a sample keep only what the record reads of it, because OpenRLHF holds it until the step ends."""
    sample.sequences = torch.from_numpy(response.token_ids).unsqueeze(0)
    sample.action_mask = sample.action_mask.bool()
    sample.attention_mask = sample.rollout_log_probs = None


def is_usable(sample: Experience) -> bool:
    """Whether a sample has a reward and finite behaviour log-probs."""
    finite = torch.isfinite(sample.rollout_log_probs)
    return sample.rewards is not None and bool(finite.all() or finite[sample.action_mask.bool()].all())


def usable_groups(samples: Sequence[Experience], size: int) -> list[Experience]:
    """The samples of the groups in which every response is usable. The log names the prompts of the other groups.

    Args:
        samples: Samples in whole groups.
        size: Number of responses of a group.

    Raises:
        ValueError: The samples are not whole groups.
    """
    usable: list[Experience] = []
    for members in in_groups(samples, size):
        if all(map(is_usable, members)):
            usable += members
        else:
            logger.warning(f"no reward, or log-probs that are not finite, for prompt {members[0].prompts[0]!r}")
    return usable


def has_reward(sample: Experience) -> bool:
    """Whether a sample has a finite reward. It has none if a reward model will judge it."""
    return sample.rewards is not None and math.isfinite(sample.rewards[0])


def reward_numbers(fresh: Sequence[Group], step: int) -> dict[str, float]:
    """Metrics of the rewards of a step's fresh groups. The first steps warn of rewards outside the task's range.

    Such rewards make the thresholds c1, c2 and c3 meaningless. If all means are above c3, nothing is ever replayed.

    Args:
        fresh: Fresh groups that can be used.
        step: Trainer step.
    """
    mean = mean_reward(fresh)
    if mean is None:
        return {"reward/fresh_mean": math.nan, "reward/outside_range": 0.0}
    low, high = fresh[0].reward_range
    outside = sum(not 0 <= reward <= 1 for group in fresh for reward in group.rewards)
    if outside and step < WARN_STEPS:
        given = [response.reward for group in fresh for response in group.responses]
        logger.warning(
            f"step {step}: rewards go from {min(given):g} to {max(given):g}, and adapt.reward_range is {low} {high}. "
            "Thresholds and filters need rewards within this range, so give --adapt.reward_range LOW HIGH"
        )
    share = outside / sum(group.size for group in fresh)
    return {"reward/fresh_mean": float(low + (high - low) * mean), "reward/outside_range": share}

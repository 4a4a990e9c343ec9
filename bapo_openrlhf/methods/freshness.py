"""Freshness-aware prioritised replay: stored groups are drawn by reward and age (arXiv 2604.16918).

Paper: "Freshness-Aware Prioritized Experience Replay for LLM/VLM Reinforcement Learning". Details follow its authors'
code (Vision-CAIR/Freshness-Aware-PER, roll/agentic/replay_buffer, read at commit dbb91df).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import compress

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.metric import declare
from bapo_openrlhf.methods.base import FilteredMethod, option

LEAST = 1e-8  # least priority in the authors' code


@dataclass(eq=False, kw_only=True)
class Freshness(FilteredMethod):
    """Replays stored groups by their reward, and an old group less often than a new one.

    Stored groups take the room that fresh ones leave. A stored group has the priority (|r| + epsilon) exp(-age / tau),
    where |r| is the mean |reward| of its responses and its age is the number of trainer steps since it was generated.
    Every draw computes all priorities again. Groups are drawn without replacement, with weight priority^exponent. They
    are at most `replay_share` of the capacity. tau matters only if the buffer holds groups about as old: with 32 new
    ones a step, 512 groups are at most 16 steps old, and exp(-16 / 500) is 0.97.

    Deviations: the authors draw single trajectories with replacement, so their |r| is no mean. They update on the fresh
    batch and then on a replayed one of the same size. Here both make one batch, so `--adapt.batch_size` should be twice
    `--rollout.batch_size`. A group is not replayed in its own step, as theirs may be. With rewards of 0 and 1, |r| is
    the mean reward of the group, so among groups with signal the easier ones are drawn more often. Groups with equal
    rewards are neither trained on nor stored, unless `--adapt.filter none` is set. The authors' runs have the
    advantages of REINFORCE++ and a buffer of 50,000 trajectories or more. The importance weights of the draw (off by
    default in their code) and the other base priorities, |advantage| and |TD error|, are not here.

    Args:
        tau: Steps in which a priority falls to 1/e, above 0. 500 in the paper, 1000 for FrozenLake.
        epsilon: Added to |r|, above 0.
        exponent: alpha, within [0, 1]. 0 draws uniformly.
        replay_share: Greatest share of the capacity that is replayed, within [0, 1].
        buffer_groups: Most groups stored, at least 1. Beyond them, the oldest leave.
    """

    USE = "Use it if a large buffer should be replayed although the policy changes fast."
    SOURCE = "arXiv 2604.16918"
    STATE = ("rng", "replay")
    METRICS = (
        *ReplayBuffer.METRICS,
        *declare("""
            freshness/stored_mean | 0 to 1 | Freshness of the buffer | | Mean exp(-age / tau) of the stored groups. \
                Close to 1, ages do not matter. Missing if none is stored.
        """),
    )

    tau: float = option(500.0, "finite and above 0")
    epsilon: float = option(1e-6, "finite and above 0")
    exponent: float = option(0.6, "in [0, 1]")
    replay_share: Fraction = option(Fraction(1, 2), "in [0, 1]")
    buffer_groups: int = option(512, "at least 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.places = math.floor(self.replay_share * self.capacity)
        self.replay = ReplayBuffer(self.buffer_groups)

    def priority(self, group: Group, step: int) -> float:
        """Priority of a stored group in trainer step `step`, before the exponent."""
        size = sum(abs(response.reward) for response in group.responses) / group.size
        return max((size + self.epsilon) * math.exp((group.step - step) / self.tau), LEAST)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: stored groups of earlier steps, drawn by their priorities."""
        keep = self.keeps(fresh)

        def replay(free: int) -> list[Group]:
            count = min(free // self.group_size, self.places)
            return self.replay.sample(count, self.rng, priority=lambda g: self.priority(g, step) ** self.exponent)

        batch = fill(self.max_responses, fresh, keep, replay=replay)
        for group in compress(fresh, keep):  # last: a step's own groups are not replayed in that same step
            self.replay.add(group)
        self.measured = self.replay.metrics(step)
        if ages := self.replay.ages(step):
            self.measured["freshness/stored_mean"] = float(np.exp(-np.array(ages) / self.tau).mean())
        return batch

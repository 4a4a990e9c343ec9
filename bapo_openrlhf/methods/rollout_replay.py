"""Rollout-level prioritised replay: single responses are replayed, by their advantage (arXiv 2606.04560).

The paper's abstract gives the rule. The numbers are those of a public implementation
(ugadiarov-la-phystech-edu/custom_vcpo, read at commit 6b06e59), because the authors' own code was not found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import compress

import numpy as np

from bapo_openrlhf.adapt.advantage import relative_rewards
from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.metric import declare
from bapo_openrlhf.methods.base import FilteredMethod, option

EPSILON = 1e-6  # so that a response without advantage can still be drawn


@dataclass(eq=False, kw_only=True)
class RolloutReplay(FilteredMethod):
    """Replays single responses, those with a large advantage more often, beside the whole fresh batch.

    A stored response keeps the advantage A of the group that it was generated in: mean and deviation are over all
    responses of that group (*generated*), however few of them are drawn. Stored responses are drawn without
    replacement with weight (|A| + 1e-6)^exponent, and stay stored. There are `replay_share` of them for each fresh
    response of the batch. The responses of a step are stored after its batch is made, so that none is replayed in its
    own step. They leave when they are more than `oldest` steps old, or when the buffer is full.

    The batch holds fresh responses first, so `--adapt.batch_size` should be 1 + `replay_share` of
    `--rollout.batch_size`.

    Deviations: the buffer holds whole groups, as many as fit into `buffer_responses`. The public implementation clips
    at 0.2 and 0.28 with a dual clip of 10; these are OpenRLHF's flags. With a critic the draw is by the group-relative
    A, too, and the advantages that are trained on are those of the critic.

    Args:
        replay_share: Replayed responses for each fresh one, at least 0.
        exponent: Exponent of the priorities, within [0, 10]. 0 draws uniformly.
        oldest: Greatest age of a replayed response in trainer steps, at least 1.
        warm_up: Number of steps at the start without replay, at least 0.
        buffer_responses: Most responses stored, at least G.
    """

    USE = "Use it if few responses of a group teach something and the others only cost time."
    SOURCE = "arXiv 2606.04560"
    related_to_generated = True
    STATE = ("rng", "replay")
    METRICS = (
        *ReplayBuffer.METRICS,
        *declare("""
            drawn/advantage | | Advantage of what is replayed | Eq. 2 | Mean |A| of the drawn responses. \
                Missing if none is drawn.
        """),
    )

    replay_share: Fraction = option(Fraction(1, 2), "at least 0")
    exponent: float = option(0.5, "in [0, 10]")
    oldest: int = option(10, "at least 1")
    warm_up: int = option(20, "at least 0")
    buffer_responses: int = 30_000
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        size, capacity = self.group_size, self.buffer_responses
        if capacity < size:
            raise ValueError(f"buffer_responses is {capacity}; it must be at least {size}, the size of a group")
        self.replay = ReplayBuffer(capacity // size, self.oldest)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: drawn responses of earlier steps, those of one group together."""
        self.replay.expire(step)
        keep = self.keeps(fresh)
        batch = fill(self.max_responses, fresh, keep)
        count = 0 if step < self.warm_up else round(self.replay_share * batch.responses)
        batch.replayed, magnitudes = self.draw(min(count, self.max_responses - batch.responses))
        for group in compress(fresh, keep):  # last: a step's own responses are not replayed in that same step
            self.replay.add(group)
        self.measured = self.replay.metrics(step)
        if len(magnitudes):
            self.measured["drawn/advantage"] = float(magnitudes.mean())
        return batch

    def draw(self, count: int) -> tuple[list[Group], np.ndarray]:
        """Up to `count` stored responses as groups with only these, and their |A|."""
        store = list(self.replay)
        if not store or count <= 0:
            return [], np.zeros(0)
        advantages = np.abs(np.concatenate([self._advantages(group) for group in store]))
        weights = (advantages + EPSILON) ** self.exponent
        count = min(count, len(weights))
        places = np.sort(self.rng.choice(len(weights), size=count, replace=False, p=weights / weights.sum()))
        ends = np.cumsum([group.size for group in store])
        positions: dict[Group, list[int]] = {}
        for place in places.tolist():
            number = int(np.searchsorted(ends, place, side="right"))
            positions.setdefault(store[number], []).append(place - int(ends[number]) + store[number].size)
        groups = [group.keep(group_positions, relative_to="generated") for group, group_positions in positions.items()]
        return groups, advantages[places]

    def _advantages(self, group: Group) -> np.ndarray:
        rewards, ends = np.array(group.generated), tuple(map(float, group.reward_range))
        return relative_rewards("group_norm", rewards, rewards, self.eps, ends)

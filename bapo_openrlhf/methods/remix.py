"""ReMix: a fixed share of each batch is replayed, after "Squeeze the Soaked Sponge" (arXiv 2507.06892)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fresh_alone
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.filters import make_filter
from bapo_openrlhf.adapt.group import Group, Prompt, as_fraction
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1


class ReMix(Method):
    """The batches of the mix-policy gradient (Mix-PPG): a share p of earlier policies' groups, 1 - p of today's.

    Fresh groups that the filter keeps are stored, the last `buffer_groups` of them, and can be replayed in the next
    `replay_steps` steps; those that are, are drawn uniformly without replacement. A batch is as large as it can be with
    at most the share p replayed. While too few groups are stored, fresh ones take their places. Otherwise fresh groups
    beyond 1 - p of the capacity are cut, those of least reward variance: `--rollout.batch_size` should be (1 - p) of
    `--adapt.batch_size`.

    Of the paper's three parts this is the data of the first. The others are settings, or not in this project:

    - raised update-to-data ratio m: OpenRLHF's `--train.max_epochs`, 2 in the paper. Set it in the preset;
    - clip of Mix-PPG, around pi_k / pi_(k-i) instead of around 1: `--adapt.ratio decoupled` is the nearest. It clips
      pi / alpha at (1 +- eps) times that centre, where the paper has that centre +- eps;
    - KL-convex constraint, towards a mixture of the reference and the previous policy: not here. `--algo.kl.init_coef`
      and `--adapt.kl_target` have one target at a time;
    - policy reincarnation, where after T steps the reference becomes today's policy and training goes on without
      replay: not here. A second run does it that starts from the first one's weights, with `--adapt.method none`.

    Deviations: fresh groups with equal rewards are neither trained on nor stored, unless `--adapt.filter none`. The
    share is counted in groups and rounded down. The distribution nu over past policies is that of the stored groups,
    each as likely as any other.

    Args:
        capacity: B, groups a batch holds at most.
        seed: of the generator behind the draws.
        filter, gaussian_mean, gaussian_std, uniform_fraction: the fresh filter, as the --adapt flags.
        replay_steps: N, how many steps a group is replayed for; 2 in the paper, the --adapt flag's default is 3.
        replay_share: p, in [0, 1); 2/5 in the paper.
        buffer_groups: most groups stored, at least 1; the oldest leave.

    Raises:
        ValueError: an option that is out of its range.
    """

    def __init__(
        self,
        *,
        capacity: int,
        seed: int = 0,
        filter: str = "range",
        gaussian_mean: float = 0.5,
        gaussian_std: float = 0.2,
        uniform_fraction: float = 0.6,
        replay_steps: int = 2,
        replay_share: Fraction = Fraction(2, 5),
        buffer_groups: int = 512,
    ) -> None:
        self.replay_share = as_fraction(replay_share)
        if not 0 <= self.replay_share < 1:
            raise ValueError(f"replay_share is {replay_share}; it must be in [0, 1)")
        if buffer_groups < 1:
            raise ValueError(f"buffer_groups is {buffer_groups}; it must be at least 1")
        self.capacity = capacity
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.fresh_filter = make_filter(filter, mean=gaussian_mean, std=gaussian_std, fraction=uniform_fraction)
        self.replay = ReplayBuffer(buffer_groups, replay_steps)
        self._metrics: dict[str, float] = {}

    def begin_step(self, step: int) -> list[Prompt]:
        """No prompt is generated again; groups older than `replay_steps` leave."""
        self.replay.expire(step)
        return []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: stored groups of earlier steps, at most the share p."""
        keep = self.fresh_filter(fresh, self.rng)
        selected, replayed = self.mix(sum(keep), len(self.replay))
        batch = fresh_alone(fresh, keep, selected)
        batch.replayed = self.replay.sample(replayed, self.rng, lambda group: True)

        for group, kept in zip(fresh, keep, strict=True):  # last: a step's own groups are not replayed in that step
            if kept:
                self.replay.add(group)
        self.replay.check()
        self._metrics = {
            "groups/capacity": self.capacity,
            "buffer/replay": len(self.replay),
            "buffer/replay_bytes": self.replay.nbytes,
            "buffer/replay_added": self.replay.counts["added"],
            "buffer/replay_evicted": self.replay.counts["evicted"],
            "buffer/replay_expired": self.replay.counts["expired"],
        }
        if len(self.replay):
            self._metrics["buffer/replay_age_mean"] = float(np.mean(self.replay.ages(step)))
        if len(batch):
            self._metrics["mix/replayed_share"] = replayed / len(batch)
        return batch

    def mix(self, fresh: int, stored: int) -> tuple[int, int]:
        """How many fresh and how many replayed groups make the largest batch, of at most the share p replayed.

        Args:
            fresh: fresh groups there are.
            stored: groups that may be replayed.
        """
        for size in range(self.capacity, 0, -1):
            replayed = min(math.floor(self.replay_share * size), stored)
            if size - replayed <= fresh:
                return size - replayed, replayed
        return 0, 0

    def metrics(self) -> dict[str, float]:
        """After the last batch.

        - groups/capacity: groups that a batch holds at most
        - buffer/replay, buffer/replay_bytes: stored groups, and bytes of their tokens and log-probs
        - buffer/replay_age_mean: trainer steps since a stored group was generated, mean; where there is one
        - buffer/replay_added, buffer/replay_evicted, buffer/replay_expired: groups, over the whole run
        - mix/replayed_share: share of the batch that is replayed, at most p; where the batch is not empty
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Stored groups and generator state."""
        return {
            "method": "remix",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. With a smaller `buffer_groups` than before, the oldest groups leave.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "remix", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.replay.load_state_dict(state["replay"])

"""ReMix: a fixed share of each batch is replayed, after "Squeeze the Soaked Sponge" (arXiv 2507.06892)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import compress

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.metric import declare
from bapo_openrlhf.methods.base import FilteredMethod, option


@dataclass(eq=False, kw_only=True)
class ReMix(FilteredMethod):
    """Replays a fixed share of each batch from the last few steps.

    These are the batches of the mix-policy gradient (Mix-PPG): a share p of earlier policies' groups, 1 - p of today's.
    The last `buffer_groups` fresh groups that the filter keeps are stored, and can be replayed in the next
    `replay_steps` steps. Replayed groups are drawn uniformly without replacement. A batch is as large as possible with
    at most the share p replayed. While too few groups are stored, fresh groups take their places. Otherwise fresh
    groups beyond 1 - p of the capacity are cut, those with the least reward variance. So `--rollout.batch_size` should
    be (1 - p) of `--adapt.batch_size`.

    This is the data of the first of the paper's three parts. The rest are settings, or not in this project:

    - The raised update-to-data ratio m is OpenRLHF's `--train.max_epochs`, 2 in the paper. Set it in the preset.
    - The clip of Mix-PPG is around pi_k / pi_(k-i) instead of around 1. `--adapt.ratio decoupled` is the nearest, and
      `remix.yaml` has it. It clips pi / alpha at (1 +- eps) times that centre, but the paper at that centre +- eps.
    - The KL-convex constraint, towards a mixture of the reference and the previous policy, is not here.
      `--algo.kl.init_coef` and `--adapt.kl_target` have one target at a time.
    - Policy reincarnation is not here: after T steps the reference becomes today's policy and training continues
      without replay. A second run does it, from the first one's weights with `--adapt.method none`.

    Deviations: the paper's code was not public, so this follows summaries of the paper. Fresh groups with equal rewards
    are neither trained on nor stored, unless `--adapt.filter none` is set. The share is counted in groups and rounded
    down. The distribution nu over past policies is that of the stored groups, all equally likely.

    Args:
        replay_steps: N, for how many steps a group is replayed. 2 in the paper, but the --adapt flag's default is 3.
        replay_share: p, in [0, 1). 2/5 in the paper.
        buffer_groups: Most groups stored, at least 1. Beyond them, the oldest leave.
    """

    USE = "Use it if generation takes most of the time: a fixed part of each batch needs none."
    SOURCE = "arXiv 2507.06892"
    STATE = ("rng", "replay")
    METRICS = (
        *ReplayBuffer.METRICS,
        *declare("""
            mix/replayed_share | 0 to 1 | Replayed share | | Share of the batch that is replayed, at most p.
        """),
    )

    replay_steps: int = 2
    replay_share: Fraction = option(Fraction(2, 5), "in [0, 1)")
    buffer_groups: int = option(512, "at least 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replay = ReplayBuffer(self.buffer_groups, self.replay_steps)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: stored groups of earlier steps, at most the share p."""
        self.replay.expire(step)
        keep = self.keeps(fresh)
        most_fresh, replayed = self.mix(sum(keep), len(self.replay))
        batch = fill(
            self.max_responses,
            fresh,
            keep,
            most_fresh=most_fresh * self.group_size,
            replay=lambda free: self.replay.sample(replayed, self.rng),
        )
        for group in compress(fresh, keep):  # last: a step's own groups are not replayed in that same step
            self.replay.add(group)
        self.measured = {
            **self.replay.metrics(step),
            **({"mix/replayed_share": replayed / len(batch)} if len(batch) else {}),
        }
        return batch

    def mix(self, fresh_size: int, store_size: int) -> tuple[int, int]:
        """How many fresh and how many stored groups make the largest batch of which at most the share p is replayed."""
        for size in range(self.capacity, 0, -1):
            replayed = min(math.floor(self.replay_share * size), store_size)
            if size - replayed <= fresh_size:
                return size - replayed, replayed
        return 0, 0

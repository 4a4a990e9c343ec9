"""POPO: the most recent groups with signal take the places of fresh ones without it (arXiv 2606.01281).

Paper: "RLVR without Ineffective Samples: Group Prioritized Off-Policy Optimization for LLM Reasoning". The rules are
those of its abstract and of its authors' article about it (QbitAI, 5 July 2026). Its equations, its code and its
settings were not at hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bapo_openrlhf.adapt.batch import Batch, fill, fitting
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.methods.base import FilteredMethod


@dataclass(eq=False, kw_only=True)
class POPO(FilteredMethod):
    """Fills the places of groups without signal with the most recent groups that had one.

    Groups whose rewards differ are stored, first in, first out. The room that fresh groups leave in the batch goes to
    stored groups of earlier steps, the one that was stored last first: how recent a group is stands for how near its
    policy is to today's. Groups are replayed as a whole, so each is of one policy. Nothing is generated again.

    The second part of POPO is a loss in which the policy that generated a group and the policy that the clip is around
    are two: `--adapt.ratio decoupled`, with `--adapt.rollout_delay 1`. The authors found that training collapses with
    groups of ten steps before, and also if replayed groups count as today's.

    What the sources leave open, and what is done here. A group stays stored after its replay, and can be replayed again
    as long as it is among the newest. The buffer holds B groups, because no older one could ever be replayed; there is
    no other limit of age. A step's own groups are not replayed in it. The weight of `--adapt.ratio decoupled` is
    OpenRLHF's, truncated at 5. Groups that the fresh filter dropped or that gave no rewards leave room in the same way.
    """

    USE = "Use it if many prompts are solved always or never and the policy moves slowly."
    SOURCE = "arXiv 2606.01281"
    STATE = ("rng", "replay")
    METRICS = ReplayBuffer.METRICS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replay = ReplayBuffer(self.capacity)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: the newest stored groups, the newest first."""
        newest = list(self.replay)[::-1]
        batch = fill(self.max_responses, fresh, self.keeps(fresh), replay=lambda free: fitting(newest, free))
        for group in filter(has_signal, fresh):  # last: a step's own groups are not replayed in that same step
            self.replay.add(group)
        self.measured = self.replay.metrics(step)
        return batch

"""Part 4 of decision_design.md: half of the groups are held out of training, and both halves are probed later.

With `--adapt.method research/held_out.py:HeldOut --adapt.replay_steps 7 --run.gradient_probe 8`, a group with an even
number is trained on in its own step, and one with an odd number is not. In the steps of the probe, groups of both
halves that are 1 to 7 steps old are in X3, and the probe compares their gradients before the update. Then all of them
are forgotten. So what is probed was trained on once or never.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.methods import BAPO

PROBED = 8  # steps from one probe to the next, as in --run.gradient_probe


def held_out(uid: int) -> bool:
    """Whether the group with this number is held out of training."""
    return uid % 2 == 1


class HeldOut(BAPO):
    """BAPO without X2 that trains on half of the groups, and replays only in the steps of the probe."""

    NAME: ClassVar[str] = "held_out"

    def keeps(self, fresh: Sequence[Group]) -> list[bool]:
        """Which fresh groups are trained on: those of one half that have a signal."""
        return [has_signal(group) and not held_out(group.uid) for group in fresh]

    def replayable(self, group: Group) -> bool:
        """Whether a group is stored: if it has a signal, also if it is held out."""
        return has_signal(group)

    def draw_replay(self, count: int, accept: Callable[[Group], bool]) -> list[Group]:
        """In the steps of the probe as many of the stored groups as fit, and then none is stored any more."""
        if not due(self.step, PROBED):
            return []
        groups = super().draw_replay(count, accept)
        self.replay = ReplayBuffer(self.buffer_size, self.replay_steps)
        return groups

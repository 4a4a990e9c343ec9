"""BAPO whose X2 takes every group with a signal: `--adapt.method research/asks_eighths.py:AsksEighths`.

Of the groups that are generated again, Eq. 6 takes those above c1. With c1 = 1/8 it throws away groups in which exactly
one of 8 responses is right (decision_design.md). Here c1 only says which prompts are hard.
"""

from typing import ClassVar

from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.methods import BAPO


class AsksEighths(BAPO):
    """BAPO that trains on every group with a signal that is generated again.

    A prompt whose group is in X2 but not above c1 stays in the hard buffer.
    """

    NAME: ClassVar[str] = "asks_eighths"

    def improved(self, group: Group) -> bool:
        """Whether a group that was generated again goes into X2: its rewards differ."""
        return has_signal(group)

"""The ledger: every group that was generated ends in exactly one counted state.

A fresh group is trained as fresh, filtered, or cut. A re-evaluated group is trained as re-evaluated, unimproved (still
too hard), solved (nothing left to learn from it), or cut. Replays and buffer traffic are counted by the buffers.
"""

from __future__ import annotations

from collections import Counter

FRESH_STATES = ("fresh", "filtered", "cut_fresh")
REEVALUATED_STATES = ("reevaluated", "unimproved", "solved", "cut_reevaluated")


class Ledger:
    """Cumulative counts of groups by final state.

    Invariant: generated_fresh and generated_reevaluated each equal the sum of their states.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, **counts: int) -> None:
        """Add counts of this step and check that they balance."""
        self.counts.update(counts)
        self.check()

    def check(self) -> None:
        """Raise RuntimeError unless every generated group is in exactly one state."""
        for generated, states in (
            ("generated_fresh", FRESH_STATES),
            ("generated_reevaluated", REEVALUATED_STATES),
        ):
            if self.counts[generated] != sum(self.counts[state] for state in states):
                raise RuntimeError(f"{generated} does not balance with {states}: {dict(self.counts)}")

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Inverse of `state_dict`."""
        self.counts = Counter(state)
        self.check()

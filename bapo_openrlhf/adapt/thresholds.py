"""Adaptive thresholds c2 and c3 of the replay buffer (Eq. 8), in exact arithmetic."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from bapo_openrlhf.adapt.metric import Metric, declare


@dataclass(frozen=True)
class Interval:
    """The interval [low, high] in which a threshold moves. If low == high, the threshold is fixed."""

    low: Fraction
    high: Fraction

    def at(self, position: Fraction) -> Fraction:
        """Eq. 8: c_i = r (c_i.high - c_i.low) + c_i.low for position r."""
        return position * (self.high - self.low) + self.low


class AdaptiveThresholds:
    """c2 and c3 as linear functions of the average reward r (Eq. 8), each in its interval.

    Eq. 8 as printed moves both up when r rises ("eq8"). The sentence above it ("from easier to harder instances") reads
    like the opposite. "text" uses 1 - r instead of r. Another direction is a ValueError.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = declare("""
        threshold/average_reward | reward | Average reward | Eq. 8 | The r that moves c2 and c3.
        threshold/c2 | reward | Threshold c2 | Eq. 5, 8 | Least group mean reward that is replayed.
        threshold/c3 | reward | Threshold c3 | Eq. 5, 8 | Greatest group mean reward that is replayed.
    """)

    def __init__(self, c2: Interval, c3: Interval, *, direction: str = "eq8") -> None:
        if direction not in ("eq8", "text"):
            raise ValueError(f"direction is {direction!r}; it must be eq8 or text")
        self._c2, self._c3 = c2, c3
        self._direction = direction
        self.average_reward: Fraction | None = None

    def update(self, batch_reward: Fraction | None) -> None:
        """Set r to the mean reward of a fresh batch, clipped to [0, 1]. None (no fresh groups) changes nothing."""
        if batch_reward is not None:
            self.average_reward = min(max(batch_reward, Fraction(0)), Fraction(1))

    @property
    def _position(self) -> Fraction:
        reward = self.average_reward if self.average_reward is not None else Fraction(0)
        return reward if self._direction == "eq8" else 1 - reward

    @property
    def c2(self) -> Fraction:
        """Lower end of the group mean reward that is worth replaying today."""
        return self._c2.at(self._position)

    @property
    def c3(self) -> Fraction:
        """Upper end of the group mean reward that is worth replaying today."""
        return self._c3.at(self._position)

    def metrics(self) -> dict[str, float]:
        """Its METRICS."""
        return {
            "threshold/average_reward": float(self.average_reward or 0),
            "threshold/c2": float(self.c2),
            "threshold/c3": float(self.c3),
        }

    def state_dict(self) -> dict[str, Any]:
        """The average reward as an exact string."""
        return {"average_reward": None if self.average_reward is None else str(self.average_reward)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.average_reward = None if state["average_reward"] is None else Fraction(state["average_reward"])

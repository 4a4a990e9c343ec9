"""When the reuse of a batch ends: the gate on the gradient of the output head (arXiv 2605.19425)."""

from collections import deque
from typing import Any, Self

import numpy as np


class ReuseGate:
    """Ends the uses of a batch when the energy of the head's gradient rises faster than it did before.

    The energy g is the squared norm of the gradient of the output head in an optimizer step, and d = g - g' is its
    increment since the optimizer step before. With mean m and standard deviation s of the last `window` increments (at
    least 2), the gate trips if (d - m) / s > tau, the `threshold` (at least 0): from the second use of a batch on, and
    with a full window. Then the optimizer is not called, and the rest of the batch's uses is left out.

    Only the abstract and others' summaries of the paper could be read. What they do not say is this project's: s is
    that of the population, the window is of optimizer steps that were made, and a dropped gradient leaves no trace.
    """

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold = threshold
        self.energy: float | None = None
        self.increments: deque[float] = deque(maxlen=window)

    def trips(self, energy: float, use: int) -> bool:
        """Whether an optimizer step of energy g is not to be made. Otherwise its energy is noted. Uses count from 1."""
        if self.energy is not None:
            increment = energy - self.energy
            if use > 1 and len(self.increments) == self.increments.maxlen:
                mean, deviation = np.mean(self.increments), np.std(self.increments)
                if increment - mean > self.threshold * deviation:
                    return True
            self.increments.append(increment)
        self.energy = energy
        return False

    @classmethod
    def of(cls, adapt: Any) -> Self | None:
        """The gate of the `--adapt` flags; None without one."""
        return None if adapt.reuse_gate is None else cls(adapt.reuse_gate, adapt.reuse_gate_window)

    def state_dict(self) -> dict[str, Any]:
        """The energy of the last optimizer step and the increments, as plain data."""
        return {"energy": self.energy, "increments": list(self.increments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.energy = state["energy"]
        self.increments.clear()
        self.increments.extend(state["increments"])

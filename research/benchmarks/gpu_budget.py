"""Plans what research/benchmarks/gpu.py still runs in the seconds that are left, by what was measured so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

RESERVE = 20.0  # seconds at the end: a run is stopped, and its processes end
FIRST = {  # what runs on an H100 took (results/gpu_second.md), of 0.6B parameters with 256 x 512 tokens a step
    "parameters": 596e6, "tokens": 131_072.0, "start": 131.0, "step": 13.0
}  # fmt: skip


class Work(NamedTuple):
    """What the seconds of a run depend on.

    Attributes:
        name: one for equal runs.
        parameters: of the models that are trained.
        tokens: generated in a step.
    """

    name: str
    parameters: float
    tokens: float

    @property
    def size(self) -> float:
        """What the seconds of a step are in proportion to."""
        return self.parameters * self.tokens


class Seconds(NamedTuple):
    """Seconds of a run until its first step begins, and of each step."""

    start: float
    step: float


class Budget:
    """The seconds that are left, and what runs are expected to take.

    Args:
        seconds: in all, from now on; None for no limit.
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.limited = clock, seconds is not None
        self._end = clock() + (math.inf if seconds is None else seconds - RESERVE)
        self._seconds: dict[Work, Seconds] = {}

    @property
    def left(self) -> float:
        """Seconds until a run must be stopped."""
        return self._end - self.clock()

    def learn(self, work: Work, seconds: Seconds) -> None:
        """Take note of what a run took. A later one counts, because compilation is done then."""
        self._seconds[work] = seconds

    def expected(self, work: Work) -> Seconds:
        """What a run takes: as the same run did, or in proportion to the slowest of the runs that are nearest in size.

        A start is taken to be as long for all models. If nothing was measured yet, earlier runs on a GPU count.
        """
        if work in self._seconds:
            return self._seconds[work]
        if not self._seconds:
            size = FIRST["parameters"] * FIRST["tokens"]
            return Seconds(FIRST["start"], FIRST["step"] * work.size / size)
        nearest = min(abs(math.log(other.size / work.size)) for other in self._seconds)
        near = [
            (seconds.start, seconds.step * work.size / other.size)
            for other, seconds in self._seconds.items()
            if abs(math.log(other.size / work.size)) == nearest
        ]
        return Seconds(*map(max, zip(*near, strict=True)))

    def steps(self, work: Work, wanted: int, least: int) -> int:
        """How many steps of a run there is time for, up to `wanted`; 0 if there are fewer than `least`."""
        start, step = self.expected(work)
        if math.isinf(self.left):
            return wanted
        count = wanted if step == 0 and self.left > start else math.floor((self.left - start) / max(step, 1e-9))
        return min(count, wanted) if count >= least else 0

    def patience(self, work: Work) -> float:
        """Seconds without a new step after which a run counts as stuck. Without a limit of seconds, none does."""
        return 3 * sum(self.expected(work)) + 60 if self.limited else math.inf

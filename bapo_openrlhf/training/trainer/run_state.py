"""Where a run is: its step, and what it does now. The trainer and its parts share it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from bapo_openrlhf.adapt.rewards import Range
from bapo_openrlhf.adapt.shift import Gap

STARTING = "starting"  # the phase of a process that has just begun


@dataclass
class RunState:
    """What changes from step to step, apart from the method, the ledger and the weights.

    Attributes:
        step: Number of updates so far. The actor holds the weights of this step.
        weights_since: The first step with today's weights. It is `step`, unless updates since then left the actor as it
            was, because a batch was empty or the actor is frozen (`--critic.freezing_steps`).
        begun: Number of the step that was begun last, from 1; 0 before the first one of this process.
        phase: What the run does now. Whoever begins something else sets it.
        saved: The newest step that a whole checkpoint has; None if there is none.
        gap: The gap of engine and actor that was measured last in a batch.
    """

    step: int = 0
    weights_since: int = 0
    begun: int = 0
    phase: str = STARTING
    stopping: bool = False
    saved: int | None = None
    gap: Gap = Gap()
    reward_range: Range | None = None  # None until it is measured

    @property
    def number(self) -> int:
        """Number of the step that goes on, from 1; of the last one until the next begins, and 0 before the first."""
        return max(self.step, self.begun)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Put step and phase before the message of an error in the block, which becomes a RuntimeError."""
        try:
            yield
        except Exception as error:
            raise RuntimeError(f"step {self.number}, {self.phase}: {message_of(error)}") from error


def message_of(error: Exception) -> str:
    """The message of an error, without the remote traceback that Ray puts before it."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause else error
    return f"{type(cause).__name__}: {str(cause).strip()}"

"""The rollouts that are generated ahead of training. A sync of the weights waits for them."""

import time
from collections import deque
from concurrent.futures import Future
from typing import Any


class RolloutQueue(deque[Future[Any]]):
    """Rollouts that were asked for and have not reached the trainer, by step; none without `--train.async_enable`."""

    def __init__(self) -> None:
        super().__init__()
        self._waited = 0.0

    def wait(self) -> None:
        """Wait until all of them are generated. The error of one that failed is raised."""
        start = time.perf_counter()
        for rollout in self:
            rollout.result()
        self._waited += time.perf_counter() - start

    def seconds_waited(self) -> float:
        """Seconds that were spent in `wait` since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

"""The weights that the rollout engines hold: when they follow the actor's, and how older ones come back."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from bapo_openrlhf.adapt.schedule import rollout_step

DEATH_NOTICE = 10.0  # seconds within which Ray reports that a process has died


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


class RolloutWeights:
    """The weights in the rollout engines, which may be older than the actor's. Only this class decides which these are.

    Args:
        delay: v, the steps between two syncs.
        sleep: Whether the engines sleep between their uses (`--vllm.enable_sleep`). Each use then wakes their weights.

    Attributes:
        queue: What the engines generate ahead of training. A sync waits for it, so that no response is of two versions.
        weights_version: Number of updates behind the weights that the engines hold.
        kept_version: The same of the weights that they have in host memory; None if they have none.
    """

    def __init__(self, engines: Sequence[Any], actor: Any, delay: int, *, sleep: bool) -> None:
        self.engines, self.actor, self.delay, self.sleep = engines, actor, delay, sleep
        self.queue = RolloutQueue()
        self.weights_version, self.kept_version = 0, None
        self._alive: list[Any] = []  # Ray's references to calls that end only when an engine dies

    def set_up(self, lora: SimpleNamespace) -> None:
        """Let the engines merge the actor's adapters (`--ds.lora.*`), and notice if one of them dies during a sync."""
        if lora.rank:
            batch_vllm_engine_call(self.engines, "merge_adapters", lora.alpha / lora.rank)
        self._alive = [engine.live.remote() for engine in self.engines]

    def follow(self, step: int, *, early: bool) -> None:
        """Sync at multiples of v (Algorithm 1, lines 3-5), or early (`--adapt.max_shift_rollout`)."""
        if rollout_step(step, self.delay) == step or early:
            self.sync(step)

    def sync(self, step: int) -> None:
        """Give the engines the actor's weights, which are those of trainer step `step`."""
        self.queue.wait()
        self._wake(self.engines)
        pending = self.actor.async_run_method(method_name="broadcast_to_vllm")
        while pending:
            # If an engine dies, the actor waits in its collective call for ever. So watch the engines meanwhile.
            done, _ = ray.wait([*pending, *self._alive], num_returns=1)
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError:
                # The collective call of the actor breaks when an engine dies, and Ray may report that first. The
                # engine's death is the reason, so raise it if it is reported soon.
                ray.get(ray.wait(self._alive, num_returns=1, timeout=DEATH_NOTICE)[0])
                raise
            pending = [ref for ref in pending if ref not in done]
        batch_vllm_engine_call(self.engines, "changed", step)
        self.weights_version = step

    @contextmanager
    def synced_to(self, step: int, *, next_rollout: int) -> Iterator[None]:
        """During the block the engines hold today's weights, of `step`; afterwards what the next rollout needs."""
        self.queue.wait()
        version = self.weights_version
        comes_back = version != step and rollout_step(next_rollout, self.delay) != next_rollout
        if comes_back and self.kept_version != version:
            self._call(self.engines, "keep_weights")
            self.kept_version = version
        if version != step:
            self.sync(step)
        yield
        if comes_back:
            self._call(self.engines, "restore_weights", version)
            self.weights_version = version
            if self.sleep:
                # Experience making and training need the memory. vLLM falls asleep only if all of it is awake, and the
                # restore has woken only the weights.
                batch_vllm_engine_call(self.engines, "wake_up", tags=["kv_cache"])
                batch_vllm_engine_call(self.engines, "sleep")

    def save(self, folder: Path) -> None:
        """Write the weights into a checkpoint. One engine writes them, because all hold the same."""
        self._call(self.engines[:1], "save_weights", str(folder))

    def resume(self, version: int, step: int, folder: Path, *, may_be_early: bool) -> None:
        """Give the engines the weights of step `version` that they held when the checkpoint of step `step` was written.

        They get today's weights instead if the delay v was changed, so that the saved ones are not those of the
        schedule. A sync may have been early with `--adapt.max_shift_rollout`. The checkpoint has no weights of `step`
        itself.
        """
        due_version = rollout_step(step, self.delay)
        usable = version >= due_version if may_be_early else version == due_version
        if version == step or not usable:
            self.sync(step)
        else:
            self._call(self.engines, "load_weights", str(folder), version)
            self.weights_version = version

    def _call(self, engines: Sequence[Any], method: str, *args: Any) -> None:
        self._wake(engines)
        batch_vllm_engine_call(engines, method, *args)

    def _wake(self, engines: Sequence[Any]) -> None:
        if self.sleep:
            batch_vllm_engine_call(engines, "wake_up", tags=["weights"])

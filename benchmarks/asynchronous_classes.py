"""The engine and the trainer that asynchronous.py measures, in a module that Ray's workers can import."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import ray

from bapo_openrlhf.training.engine import engines
from bapo_openrlhf.training.trainer import trainer

SLEEP = "ASYNCHRONOUS_SLEEP"  # environment variable: seconds that each call of the engine takes longer
WALL = "wall_seconds"  # a metric: the time at the end of the step


class SleepingEngine(engines.RolloutEngine):
    """An engine that takes longer, and no processor meanwhile, as an engine on a GPU of its own does."""

    async def generate_groups(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(float(os.environ[SLEEP]))
        return await super().generate_groups(*args, **kwargs)


class TimedTrainer(trainer.AdaptedPPOTrainer):
    """The trainer, which notes when each step has ended."""

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: Any = None
    ) -> None:
        super().save_logs_and_checkpoints(global_step, (logs_dict or {}) | {WALL: time.time()}, client_states)


SleepingActor = ray.remote(SleepingEngine)
TimedTrainerActor = ray.remote(TimedTrainer)

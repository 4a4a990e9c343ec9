"""The grid of a plan: each model on each number of GPUs, with each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf.workbench.planning import memory
from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.groups import Groups, average_groups, happenings, replayable_groups, rollouts
from bapo_openrlhf.workbench.planning.memory import Memory
from bapo_openrlhf.workbench.planning.settings import METHODS, Method, Settings
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.times import GPUCosts, average_seconds, lengths


@dataclass(frozen=True)
class Entry:
    """One model on so many GPUs with one method; all of it predicted.

    Attributes:
        groups: of an average step.
        responses, generated_tokens, trained_tokens: of an average step; tokens are those of responses.
        rollouts: responses of the whole run.
        tensor_parallel: GPUs of an engine; None where none is large enough.
        seconds: of an average step by phase; None where it does not fit.
        sync_bytes: that the engines' GPUs receive in one sync, all together.
        syncs: of the whole run, those for re-evaluations between two syncs included.
        replay_bytes, replay_bytes_most: of the replay buffer: expected, and full of the longest samples.
        delayed_bytes: on the host of each engine, for the delayed weights.
    """

    model: str
    gpus: int
    method: str
    memory: Memory
    groups: Groups
    responses: float
    generated_tokens: float
    trained_tokens: float
    rollouts: float
    tensor_parallel: int | None
    seconds: dict[str, float] | None
    sync_bytes: float
    syncs: int
    replay_bytes: float
    replay_bytes_most: float
    hard_bytes: float
    delayed_bytes: float

    @property
    def step_seconds(self) -> float | None:
        """Of all phases; None where it does not fit."""
        return sum(self.seconds.values()) if self.seconds is not None else None


@dataclass(frozen=True)
class Plan:
    """What was planned, and from what.

    Attributes:
        steps: of the whole run.
        gpu: kind of GPU.
    """

    entries: tuple[Entry, ...]
    shapes: tuple[ModelShape, ...]
    settings: Settings
    constants: Constants
    steps: int
    gpu: str
    command: str

    def entry(self, model: str, gpus: int, method: str) -> Entry:
        """The one entry of these three."""
        (found,) = [e for e in self.entries if (e.model, e.gpus, e.method) == (model, gpus, method)]
        return found


def plan_entry(shape: ModelShape, gpus: int, method: Method, settings: Settings, constants: Constants,
               steps: int) -> Entry:  # fmt: skip
    """One entry of the grid."""
    found = memory.gpu_memory(shape, settings, constants, method, gpus)
    groups, length = average_groups(method, settings, constants), lengths(settings, constants)
    size = memory.tensor_parallel(shape, settings, constants)
    seconds = None
    if found.word == "fits" and size is not None:
        cache = memory.cache_tokens(shape, settings, constants, size)
        costs = GPUCosts(shape, settings, method, constants, gpus, size, cache)
        seconds = average_seconds(method, settings, constants, costs)
    responses = settings.group_size * groups.generated
    stored = replayable_groups(settings, constants)
    return Entry(
        model=shape.name,
        gpus=gpus,
        method=method.name,
        memory=found,
        groups=groups,
        responses=responses,
        generated_tokens=responses * length.response,
        trained_tokens=settings.group_size * groups.trained * length.response,
        rollouts=rollouts(method, settings, constants, steps),
        tensor_parallel=size,
        seconds=seconds,
        sync_bytes=float(shape.weight_bytes) * settings.gpus_of("engines", method, gpus),
        syncs=happenings(settings.schedule(method), steps).sent,
        replay_bytes=memory.replay_bytes(settings, constants, groups=stored) if method.adapted else 0.0,
        replay_bytes_most=memory.replay_bytes(settings, constants) if method.adapted else 0.0,
        hard_bytes=memory.hard_bytes(settings, constants) if method.adapted else 0.0,
        delayed_bytes=memory.delayed_weight_bytes(shape, settings, method),
    )


def make_plan(shapes: Sequence[ModelShape], gpus: Sequence[int], settings: Settings, constants: Constants, *,
              steps: int, gpu: str, command: str = "") -> Plan:  # fmt: skip
    """The whole grid, models first, then GPUs, then methods."""
    entries = tuple(
        plan_entry(shape, count, method, settings, constants, steps)
        for shape in shapes
        for count in gpus
        for method in METHODS
    )
    return Plan(entries, tuple(shapes), settings, constants, steps, gpu, command)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON holds it; `kind` says that nothing of it was measured."""
    return {
        "kind": "predicted",
        "command": plan.command,
        "gpu": plan.gpu,
        "steps": plan.steps,
        "units": "bytes, seconds, tokens; groups and responses of an average step",
        "constants": [
            dict(zip(("name", "value", "unit", "meaning", "source"), row, strict=True)) for row in plan.constants.rows()
        ],
        "models": [{"name": shape.name, "parameters": shape.parameters} for shape in plan.shapes],
        "entries": [
            {
                "model": e.model,
                "gpus": e.gpus,
                "method": e.method,
                "fits": e.memory.word,
                "why": memory.REASONS[e.memory.word],
                "step_seconds": e.step_seconds,
                "seconds": e.seconds,
                "groups": dict(vars(e.groups)),
                "responses": e.responses,
                "generated_tokens": e.generated_tokens,
                "trained_tokens": e.trained_tokens,
                "rollouts": e.rollouts,
                "tensor_parallel": e.tensor_parallel,
                "gpu_bytes": {
                    name: getattr(e.memory, name)
                    for name in ("generation", "experience", "training", "state", "activations", "engine", "most")
                },
                "sync_bytes": e.sync_bytes,
                "syncs": e.syncs,
                "sync_bytes_step": e.sync_bytes * e.syncs / plan.steps,
                "sync_bytes_total": e.sync_bytes * e.syncs,
                "replay_bytes": e.replay_bytes,
                "replay_bytes_most": e.replay_bytes_most,
                "hard_bytes": e.hard_bytes,
                "delayed_bytes_engine": e.delayed_bytes,
            }
            for e in plan.entries
        ],
    }

"""The grid of a plan: each model on each number of GPUs with each algorithm."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bapo_openrlhf.workbench.planning import memory
from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.groups import Groups, average_groups, happenings, replayable_groups, rollouts
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.times import GPUCosts, average_seconds, lengths
from bapo_openrlhf.workbench.planning.verdict import verdict
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS, Algorithm, Workload


@dataclass(frozen=True)
class Entry:
    """Predictions for one model on so many GPUs with one algorithm, in the form of plan.json.

    Attributes:
        method: Name of the algorithm.
        fits, why: The key of `memory.REASONS` that says whether the run fits, and its value.
        step_seconds: Seconds of all phases of an average step. None means that the run does not fit.
        seconds: Seconds of an average step by phase, or None.
        groups: Groups of an average step.
        responses, trained_tokens: Counts of an average step. Tokens are tokens of responses.
        rollouts: Responses of the whole run.
        tensor_parallel: Number of GPUs of an engine. None means that no engine is large enough.
        gpu_bytes: Bytes on the fullest GPU by name (`memory.Memory`).
        sync_bytes: Bytes that the GPUs of all engines together receive in one sync.
        syncs: Syncs of the whole run, including those for re-evaluations between two regular syncs.
        replay_bytes, replay_bytes_most: Bytes of the replay buffer: expected, and full of the longest samples.
        hard_bytes: Bytes of a full hard buffer.
        delayed_bytes_engine: Bytes on the host of each engine for the delayed weights.
    """

    model: str
    gpus: int
    method: str
    fits: str
    why: str
    step_seconds: float | None
    seconds: dict[str, float] | None
    groups: Groups
    responses: float
    trained_tokens: float
    rollouts: float
    tensor_parallel: int | None
    gpu_bytes: dict[str, float]
    sync_bytes: float
    syncs: int
    replay_bytes: float
    replay_bytes_most: float
    hard_bytes: float
    delayed_bytes_engine: float


@dataclass(frozen=True)
class Plan:
    """The predictions, and what they were made from.

    Attributes:
        steps: Trainer steps of the whole run.
        gpu: Kind of GPU.
        command: The command that made the plan.
        verdicts: What the plan comes to, for each model.
    """

    entries: tuple[Entry, ...]
    shapes: tuple[ModelShape, ...]
    constants: Constants
    steps: int
    gpu: str
    command: str
    verdicts: tuple[str, ...]

    def entry(self, model: str, gpus: int, method: str) -> Entry:
        """The one entry of this model, number of GPUs and algorithm."""
        return next(e for e in self.entries if (e.model, e.gpus, e.method) == (model, gpus, method))


def plan_entry(shape: ModelShape, gpus: int, algorithm: Algorithm, workload: Workload, constants: Constants,
               steps: int) -> Entry:  # fmt: skip
    """One entry of the grid."""
    found = memory.gpu_memory(shape, workload, constants, algorithm, gpus)
    groups, length = average_groups(algorithm, workload, constants), lengths(workload, constants)
    size = memory.tensor_parallel(shape, workload, constants)
    seconds = None
    if found.word == "fits":
        cache = memory.cache_tokens(shape, workload, constants, size)
        costs = GPUCosts(shape, workload, algorithm, constants, gpus, size, cache)
        seconds = average_seconds(algorithm, workload, constants, costs)
    group_size = workload.args.rollout.n_samples_per_prompt
    responses = group_size * groups.generated
    stored = replayable_groups(workload, constants)
    sync_bytes = float(shape.weight_bytes) * workload.gpus_of("engines", algorithm, gpus)
    syncs = happenings(workload.schedule(algorithm), steps).sent
    return Entry(
        model=shape.name,
        gpus=gpus,
        method=algorithm.name,
        fits=found.word,
        why=memory.REASONS[found.word],
        step_seconds=sum(seconds.values()) if seconds is not None else None,
        seconds=seconds,
        groups=groups,
        responses=responses,
        trained_tokens=group_size * groups.trained * length.response,
        rollouts=rollouts(algorithm, workload, constants, steps),
        tensor_parallel=size,
        gpu_bytes={
            name: getattr(found, name)
            for name in ("generation", "experience", "training", "state", "activations", "engine", "most")
        },
        sync_bytes=sync_bytes,
        syncs=syncs,
        replay_bytes=memory.replay_bytes(workload, constants, groups=stored) if algorithm.adapted else 0.0,
        replay_bytes_most=memory.replay_bytes(workload, constants) if algorithm.adapted else 0.0,
        hard_bytes=memory.hard_bytes(workload, constants) if algorithm.adapted else 0.0,
        delayed_bytes_engine=memory.delayed_weight_bytes(shape, workload, algorithm),
    )


def make_plan(shapes: Sequence[ModelShape], gpus: Sequence[int], workload: Workload, constants: Constants, *,
              steps: int, gpu: str, command: str = "") -> Plan:  # fmt: skip
    """The whole grid, ordered by model, then by number of GPUs, then by algorithm."""
    entries = tuple(
        plan_entry(shape, count, algorithm, workload, constants, steps)
        for shape in shapes
        for count in gpus
        for algorithm in ALGORITHMS
    )
    verdicts = tuple(verdict(shape, gpus, workload, constants, gpu) for shape in shapes)
    return Plan(entries, tuple(shapes), constants, steps, gpu, command, verdicts)


def as_json(plan: Plan) -> dict[str, Any]:
    """The content of plan.json. Its `kind` says that nothing was measured."""
    return {
        "kind": "predicted",
        "verdicts": list(plan.verdicts),
        "command": plan.command,
        "gpu": plan.gpu,
        "steps": plan.steps,
        "units": "bytes, seconds, tokens; groups and responses of an average step",
        "constants": plan.constants.rows(),
        "models": [{"name": shape.name, "parameters": shape.parameters} for shape in plan.shapes],
        "entries": [asdict(entry) for entry in plan.entries],
    }

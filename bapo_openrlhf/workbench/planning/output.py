"""A plan as a page of tables: what each algorithm does, and what each model takes on each number of GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.planning.constants import GIB, Constants
from bapo_openrlhf.workbench.planning.groups import average_groups, critic_groups, replayable_groups, rollouts
from bapo_openrlhf.workbench.planning.memory import REASONS, TOKEN, Memory, gpu_memory, host_memory, replay_bytes
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.verdict import verdict
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS, Algorithm, Workload


@dataclass(frozen=True)
class Plan:
    """What a plan is made from. `gpus` are in rising order, and `steps` are those of the whole run."""

    shapes: Sequence[ModelShape]
    gpus: Sequence[int]
    workload: Workload
    constants: Constants
    steps: int

    def counts(self, algorithm: Algorithm) -> dict[str, Any]:
        """What an algorithm does on any model and GPUs: in an average step, but `rollouts` in the whole run.

        The buffers are on the host. `replay_bytes` are expected, and `replay_bytes_most` are those of a buffer full of
        the longest samples.
        """
        workload, constants = self.workload, self.constants
        groups = average_groups(algorithm, workload, constants)
        prompt = constants.prompt_share * workload.prompt_tokens  # mean length
        response = constants.response_share * workload.response_tokens
        size, buffers = workload.args.rollout.n_samples_per_prompt, float(algorithm.adapted)
        stored, most = buffers * replayable_groups(workload, constants), buffers * workload.replay_capacity
        return {
            "method": algorithm.name,
            **asdict(groups),
            "trained": groups.trained,
            "responses": size * groups.generated,
            "update_tokens": size * groups.trained * response,
            "critic_tokens": size * critic_groups(algorithm, workload, groups, self.steps) * response,
            "rollouts": rollouts(algorithm, workload, constants, self.steps),
            "replay_bytes": replay_bytes(workload, prompt, response, stored),
            "replay_bytes_most": replay_bytes(workload, workload.prompt_tokens, workload.response_tokens, most),
            "hard_bytes": buffers * workload.args.adapt.buffer_size * TOKEN * prompt,
        }


def page(plan: Plan) -> str:
    """The whole plan as Markdown. It can also be read in a terminal."""
    lines = _lines(plan)
    words = dict.fromkeys(size.word for sizes in lines.values() for size in sizes)
    constants = pd.DataFrame(plan.constants.rows(), dtype=object)
    constants["value"] = constants["value"].map("{:g}".format)
    parts = [
        *(f"{verdict(shape, plan.gpus, plan.workload, plan.constants)}\n" for shape in plan.shapes),
        *_not_predicted(plan),
        "# Plan: predicted, not measured\n",
        f"{plan.constants.gpu}, {plan.steps} trainer steps. All numbers are predictions from the flags and from the "
        "constants at the end; no model was loaded.\n",
        "## Groups of an average step, responses, tokens\n",
        _groups(plan),
        "## Predicted GiB on the fullest GPU: while generating / while training\n",
        _memory(plan, lines),
        "".join(f"- {word}: {REASONS[word]}\n" for word in words if word != "fits"),
        "## Predicted GB of a machine's memory, and on the disk\n",
        _host(plan),
        "## Predicted buffers\n",
        _buffers(plan),
        "## Constants\n",
        Table(constants, words=5).markdown(),
    ]
    return "\n".join(parts)


def _not_predicted(plan: Plan) -> list[str]:
    adapt = plan.workload.args.adapt
    if not adapt.enabled or adapt.method == "bapo":
        return []
    return [f"adapt.method is {adapt.method}; it is not predicted, and the rows of BAPO stand for it.\n"]


def _groups(plan: Plan) -> str:
    head = ("fresh", "again", "x1", "x2", "x3", "trained", "responses", "update_tokens", "critic_tokens", "rollouts")
    counts = [plan.counts(algorithm) for algorithm in ALGORITHMS]
    rows = [(e["method"], *(e[name] for name in head), e["rollouts"] / counts[0]["rollouts"]) for e in counts]
    table = Table.of(("method", *(name.replace("_", " ").replace("x", "X") for name in head), "x GRPO"), rows)
    return table.markdown() + f'\n"rollouts" are the responses of all {plan.steps} steps.\n'


def _lines(plan: Plan) -> dict[str, tuple[Memory, ...]]:
    """The sizes of all models on all numbers of GPUs, by algorithm. Algorithms of the same memory share a line."""
    names: dict[tuple[Memory, ...], list[str]] = {}
    places = [(shape, gpus) for shape in plan.shapes for gpus in plan.gpus]
    for algorithm in ALGORITHMS:
        sizes = tuple(gpu_memory(shape, plan.workload, plan.constants, algorithm, gpus) for shape, gpus in places)
        names.setdefault(sizes, []).append(algorithm.name)
    return {", ".join(algorithms): sizes for sizes, algorithms in names.items()}


def _memory(plan: Plan, lines: Mapping[str, Sequence[Memory]]) -> str:
    def cell(size: Memory) -> str:
        word = "" if size.word == "fits" else f" {size.word}"
        return f"{size.generation / GIB:.1f} / {max(size.experience, size.training) / GIB:.1f}{word}"

    places = [(shape.name, str(gpus)) for shape in plan.shapes for gpus in plan.gpus]
    rows = [
        (*place, sizes[0].engine_gpus, *map(cell, sizes))
        for place, sizes in zip(places, zip(*lines.values(), strict=True), strict=True)
    ]
    return Table.of(("model", "GPUs", "GPUs per engine", *lines), rows).markdown()


def _host(plan: Plan) -> str:
    workload, name, saved = plan.workload, plan.workload.algorithm.name, plan.workload.args.ckpt.max_num
    rows = []
    for shape in plan.shapes:
        for gpus in plan.gpus:
            host = host_memory(shape, workload, plan.constants, workload.algorithm, gpus)
            parts = [part / host.machines for part in (host.engines, host.delayed, host.optimizers)]
            sizes = [*parts, host.object_store, host.machine, host.checkpoint]
            rows.append((shape.name, str(gpus), *(f"{size / 1e9:.1f}" for size in sizes)))
    head = ("model", "GPUs", "engines asleep", "delayed weights", "optimizer states", "Ray's objects", "a machine")
    note = "They do not count the code and data of the processes themselves."
    return (
        Table.of((*head, "a checkpoint"), rows).markdown() + f"\nFor {name}, which keeps {saved} checkpoints. {note}\n"
    )


def _buffers(plan: Plan) -> str:
    adapted = plan.counts(next(one for one in ALGORITHMS if one.adapted))
    return (
        f"Replay buffer, on the host: {adapted['replay_bytes'] / GIB:.3g} GiB expected, "
        f"{adapted['replay_bytes_most'] / GIB:.3g} GiB full of the longest samples. Hard buffer, which holds only "
        f"prompts: {adapted['hard_bytes'] / 2**20:.3g} MiB full.\n"
    )

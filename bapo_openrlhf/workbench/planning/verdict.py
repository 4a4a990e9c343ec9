"""What a plan comes to, in a few sentences: whether the configuration fits, the tightest phase, and what to change.

It proposes the lowest ZeRO stage that fits, and no recomputation of activations if they fit. A higher stage shares more
and sends more (arXiv 1910.02054). Stage 1 sums gradients over the ranks once in an optimizer step, stage 2 in each
micro-batch, and stage 3 also gathers each layer's weights for each pass.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from bapo_openrlhf.flags.conflicts import RANKS, WITH_FLAGS
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.flags.rules import OPTIONS, SIZES
from bapo_openrlhf.workbench.pages.text import many
from bapo_openrlhf.workbench.planning.constants import GIB, Constants
from bapo_openrlhf.workbench.planning.memory import PHASES, REASONS, Memory, cache_tokens, gpu_memory
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.workload import Workload

STAGE, RECOMPUTES = "ds.zero_stage", "actor.gradient_checkpointing_enable"
MOST_CHANGES = 3  # Flags that are changed together at most.
# Values that may make a run fit, in the order in which they are tried.
CHANGES: tuple[tuple[str, Any], ...] = (
    ("vllm.enable_sleep", True),
    ("ds.enable_sleep", True),
    (RECOMPUTES, True),
    (STAGE, 2),
    (STAGE, 3),
    ("train.micro_batch_size", 1),
    ("rollout.micro_batch_size", 1),
    ("vllm.gpu_memory_utilization", 0.5),
    ("vllm.gpu_memory_utilization", 0.9),
    ("ds.adam_offload", True),
)
NO_FLAG = "No flag that the plan tries is enough: take more GPUs, GPUs with more memory, or a smaller model."


def verdict(shape: ModelShape, gpus: Sequence[int], workload: Workload, constants: Constants) -> str:
    """The sentences for one model, on the configuration's own number of GPUs, or on the lowest of `gpus`."""
    by_gpus = {count: gpu_memory(shape, workload, constants, workload.algorithm, count) for count in gpus}
    number = workload.gpus if workload.gpus in gpus else min(gpus)
    memory, name = by_gpus[number], f"{shape.name} with {workload.algorithm.name}"
    hardware = many(number, f"{constants.gpu} GPU")
    fitting = [count for count in gpus if by_gpus[count].word == "fits"]
    if memory.word == "fits":
        others = [str(count) for count in sorted(set(gpus) - set(fitting))]
        but = f" It does not fit on {_or(others)}; the tables below say why." if others else ""
        faster = _faster(shape, number, workload, constants)
        return f"Predicted: {name} fits on {hardware}. {_tightest(memory, constants)}{faster}{but}"
    changes = _changes(shape, number, workload, constants)
    remedies = [f"with {' '.join(changes)}"] if changes else []
    if larger := [count for count in fitting if count > number]:
        remedies.append(f"on {many(min(larger), f'{constants.gpu} GPU')}")
    advice = f"It would fit {_or(remedies)}." if remedies else NO_FLAG
    return f"Predicted: {name} does not fit on {hardware}. {_why(memory, shape, workload, constants)} {advice}"


def _faster(shape: ModelShape, gpus: int, workload: Workload, constants: Constants) -> str:
    flags = proposal(shape, gpus, workload, constants)
    current = {STAGE: workload.args.ds.zero_stage, RECOMPUTES: workload.args.actor.gradient_checkpointing_enable}
    if not flags or flags == current or any(flags[flag] > current[flag] for flag in flags):
        return ""
    changes = [f"with --{STAGE} {flags[STAGE]}"] if flags[STAGE] < current[STAGE] else []
    changes += [f"without --{RECOMPUTES}"] if flags[RECOMPUTES] < current[RECOMPUTES] else []
    memory = gpu_memory(shape, workload.with_flags(flags), constants, workload.algorithm, gpus)
    return f" It also fits {' and '.join(changes)}, which is faster: {memory.gib:.1f} GiB in the tightest phase."


def _tightest(memory: Memory, constants: Constants) -> str:
    phases = {phase: getattr(memory, phase) / GIB for phase in PHASES}
    phase, size, reserve = max(phases, key=phases.__getitem__), constants.gpu_bytes / GIB, constants.reserve_bytes / GIB
    margin = size - phases[phase] - reserve
    end = f"{margin:.1f} GiB ({margin / size:.0%}) are free" if margin >= 0 else f"{-margin:.1f} GiB too much"
    parts = f"{phases[phase]:.1f} GiB, and {reserve:.0f} for CUDA and NCCL, of {size:.1f} GiB a GPU"
    return f"The tightest phase is {phase}: {parts}; {end}."


def _why(memory: Memory, shape: ModelShape, workload: Workload, constants: Constants) -> str:
    if memory.word in ("training", "together"):
        return _tightest(memory, constants)
    reason = REASONS[memory.word]
    if memory.word == "engine":
        most = constants.gpus_per_machine
        tokens = workload.sample_tokens - cache_tokens(shape, workload, constants, most)
        missing = tokens * shape.cache_bytes / most / GIB
        reason += f". The tightest phase is generation: {missing:.1f} GiB a GPU are missing"
    return f"{reason[0].upper()}{reason[1:]}."


def _changes(shape: ModelShape, gpus: int, workload: Workload, constants: Constants) -> list[str]:
    """The fewest flags that make the run fit on so many GPUs; nothing if no MOST_CHANGES of CHANGES do."""
    enough = ("train.batch_size", workload.most_ranks(workload.algorithm, gpus) * workload.args.train.micro_batch_size)
    for count in range(1, MOST_CHANGES + 1):
        for combination in combinations((*CHANGES, enough), count):
            changed = workload.with_flags(dict(combination))
            memory = gpu_memory(shape, changed, constants, workload.algorithm, gpus)
            if memory.word == "fits" and not _refused(changed, workload):
                return [f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in combination]
    return []


def _refused(changed: Workload, workload: Workload) -> bool:
    """Whether changed flags break a rule that they did not break before."""
    now, before = (Flags.of(one.args) for one in (changed, workload))
    return any(rule.broken(now) and not rule.broken(before) for rule in (*SIZES, *RANKS, *OPTIONS, *WITH_FLAGS))


def _or(parts: Sequence[str]) -> str:
    *first, end = parts
    return f"{', '.join(first)} or {end}" if first else end


# ── the lowest stage ──


def _lowest_stage(shape: ModelShape, gpus: int, workload: Workload, constants: Constants) -> int | None:
    """The first of ZeRO's stages 1, 2 and 3 that fits on so many GPUs; None if none does."""
    # In stage 0 DeepSpeed cannot put a model to sleep. For one rank all are the same, and 2 is OpenRLHF's default.
    for stage in (1, 2, 3) if workload.most_ranks(workload.algorithm, gpus) > 1 else (2,):
        changed = workload.with_flags({STAGE: stage})
        memory = gpu_memory(shape, changed, constants, workload.algorithm, gpus)
        if memory.word == "fits" and not _refused(changed, workload):
            return stage
    return None


def proposal(shape: ModelShape, gpus: int, workload: Workload, constants: Constants) -> dict[str, Any] | None:
    """The lowest STAGE that fits with recomputation, and RECOMPUTES, false if it fits without; None if nothing fits."""
    stage = _lowest_stage(shape, gpus, workload.with_flags({RECOMPUTES: True}), constants)
    if stage is None:
        return None
    flags = {STAGE: stage, RECOMPUTES: False}
    memory = gpu_memory(shape, workload.with_flags(flags), constants, workload.algorithm, gpus)
    # A plan does not count images, so with images activations are computed again.
    return flags | {RECOMPUTES: memory.word != "fits" or bool(workload.args.data.max_images_per_prompt)}

"""What a plan proposes: the lowest ZeRO stage that fits, and no recomputation of activations if they fit.

A higher stage shares more and sends more (arXiv 1910.02054). Stage 1 sums gradients over the ranks once in an optimizer
step, stage 2 in each micro-batch, and stage 3 also gathers each layer's weights for each pass.
"""

from typing import Any

from bapo_openrlhf.workbench.pages.text import many
from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.memory import Memory, gpu_memory
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.workload import Workload

STAGE, RECOMPUTES = "ds.zero_stage", "actor.gradient_checkpointing_enable"


def most_ranks(workload: Workload, gpus: int) -> int:
    return max(workload.ranks(model, workload.algorithm, gpus) for model in workload.algorithm.trained)


def lowest_stage(
    shape: ModelShape, gpus: int, workload: Workload, constants: Constants
) -> tuple[int, Memory] | tuple[None, None]:
    """The first of ZeRO's stages 1, 2 and 3 that fits on so many GPUs, and its memory; None if none does."""
    # In stage 0 DeepSpeed cannot put a model to sleep. For one rank all are the same, and 2 is OpenRLHF's default.
    for stage in (1, 2, 3) if most_ranks(workload, gpus) > 1 else (2,):
        needed = gpu_memory(shape, workload.with_flags({STAGE: stage}), constants, workload.algorithm, gpus)
        if needed.word == "fits":
            return stage, needed
    return None, None


def proposed(shape: ModelShape, gpus: int, workload: Workload, constants: Constants) -> dict[str, Any] | None:
    """The lowest STAGE that fits with recomputation, and RECOMPUTES, false if it fits without; None if nothing fits."""
    stage, _ = lowest_stage(shape, gpus, workload.with_flags({RECOMPUTES: True}), constants)
    if stage is None:
        return None
    kept = {STAGE: stage, RECOMPUTES: False}
    needed = gpu_memory(shape, workload.with_flags(kept), constants, workload.algorithm, gpus)
    # A plan does not count images, so with images activations are computed again.
    return kept | {RECOMPUTES: needed.word != "fits" or bool(workload.args.data.max_images_per_prompt)}


def lower_stage(shape: ModelShape, workload: Workload, constants: Constants, gpu: str) -> list[str]:
    """A warning if the workload has ZeRO stage 3 although a lower one fits, with the memory of both."""
    if workload.args.ds.zero_stage < 3:
        return []
    gpus = workload.gpus
    stage, lower = lowest_stage(shape, gpus, workload, constants)
    if stage in (None, 3):
        return []
    current = gpu_memory(shape, workload, constants, workload.algorithm, gpus)
    sizes = (
        f"{lower.gib:.1f} GiB a GPU in the tightest phase with stage {stage}, and {current.gib:.1f} GiB with stage 3"
    )
    return [
        f"{STAGE} is 3; {stage} fits too, and takes less time, because stage 3 gathers the weights for each pass. "
        f"Predicted for {shape.name} on {many(gpus, f'{gpu} GPU')} (--gpu names another kind): {sizes}"
    ]

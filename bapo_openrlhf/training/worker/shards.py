"""What this rank has of a model's weights and gradients, and an optimizer step without its optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad


def part_of(parameter: torch.nn.Parameter, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """What this rank has of a parameter, or of its gradient, which is divided as it is: all, unless ZeRO-3 divides it.

    DeepSpeed never writes to the memory that fills up the last parts, so it may hold anything, and is left out.
    """
    if not hasattr(parameter, "ds_tensor"):
        return parameter.data
    part: torch.Tensor = parameter.ds_tensor.data if gradient is None else gradient
    return part[: max(0, parameter.ds_numel - part.numel() * dist.get_rank(parameter.ds_process_group))]


def gradient_part(parameter: Any) -> torch.Tensor:
    """This rank's flat part of a gradient before the optimizer step. The parts of all ranks are the gradient, once."""
    if hasattr(parameter, "ds_tensor"):
        return part_of(parameter, safe_get_local_grad(parameter))
    if hasattr(parameter, "_hp_grad") or not hasattr(parameter, "_hp_mapping"):
        # Each rank has all of it: in stage 0, and in stage 1 with sums in float32, which has them in `_hp_grad`.
        gradient: torch.Tensor = getattr(parameter, "_hp_grad", parameter.grad)
        return gradient.flatten().tensor_split(dist.get_world_size())[dist.get_rank()]
    if parameter._hp_mapping is None:
        return parameter.new_zeros(0)
    part: torch.Tensor = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return part.flatten()


def head_energy(model: torch.nn.Module) -> float:
    """Squared norm of the gradient of a model's output head, before clipping. All ranks must call this."""
    part = gradient_part(model.get_output_embeddings().weight)
    energy = part.double().square().sum().to(torch.cuda.current_device())
    dist.all_reduce(energy)
    return float(energy)


@contextmanager
def optimizer_left_out(engine: Any) -> Iterator[None]:
    """In the block, DeepSpeed's step only forgets the gradient. With a gradient of 0, Adam's momentum would go on."""
    optimizer, step, schedule = engine.basic_optimizer, engine.basic_optimizer.step, engine.lr_scheduler
    optimizer.step, engine.lr_scheduler = lambda *_, **__: None, None
    try:
        yield
    finally:
        optimizer.step, engine.lr_scheduler = step, schedule

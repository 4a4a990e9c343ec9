"""Take the actor's weights, in a vLLM worker. `weight_sync` sends them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bapo_openrlhf.training.engine.adapters import is_adapter
from bapo_openrlhf.training.wire.packing import Piece


def receive(worker: Any, pieces: Sequence[Piece], dtype: torch.dtype) -> None:
    """Receive a parcel that rank 0 of the actor broadcasts, and load it. Raises RuntimeError as `load` does."""
    # Receive before checking, because a sender without a receiver would not fail but wait until the group's timeout.
    flat = torch.empty(sum(math.prod(shape) for _, shape in pieces), dtype=dtype, device=worker.device)
    worker._model_update_group.broadcast(flat, src=0, stream=torch.cuda.current_stream() if flat.is_cuda else None)
    load(worker, pieces, flat)


def borrow(worker: Any, pieces: Sequence[Piece], handles: Mapping[str, tuple[Any, tuple]]) -> None:
    """Load a parcel from the memory of the actor's rank on the same GPU (CUDA IPC). Raises RuntimeError as `load` does.

    The handles are what torch's `reduce_tensor` makes of the parcel, by the GPU's id.
    """
    from openrlhf.trainer.ray.utils import get_physical_gpu_id

    rebuild, given = handles[get_physical_gpu_id()]
    arguments = list(given)
    arguments[6] = worker.device.index  # the number of the GPU in this process, which may see other GPUs
    load(worker, pieces, rebuild(*arguments))
    torch.cuda.synchronize()  # the memory is the actor's again after this


def load(worker: Any, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
    """Load the tensors of a parcel into a worker's model.

    Raises:
        RuntimeError: The tensors have another dtype than vLLM's model, or the model has no weight of these names.
    """
    adapters = all(is_adapter(name) for name, _ in pieces)  # DeepSpeed may keep them in float32
    if flat.dtype != worker.model_config.dtype and not adapters:
        raise RuntimeError(f"weights are {flat.dtype} in the actor and {worker.model_config.dtype} in vLLM")
    parts = flat.split([math.prod(shape) for _, shape in pieces])
    weights = [(name, part.view(shape)) for (name, shape), part in zip(pieces, parts, strict=True)]
    loaded = worker.model_runner.model.load_weights(weights=weights)
    if loaded is not None and not loaded:
        raise RuntimeError(f"vLLM has none of the actor's weights {', '.join(name for name, _ in pieces)}")

"""Take the actor's weights, in a vLLM worker, and merge its LoRA adapters into them. `weight_sync` sends them.

With `--ds.lora.rank` the weight sync sends tensors under PEFT's names, which vLLM's model does not have. Here each vLLM
worker holds the frozen weight of a layer until both factors of its adapter have come, and needs the memory of one more
layer for that. It then loads their sum, in the layer's own name:

    W + alpha / r * B A    (LoRA, arXiv 2106.09685, Sec. 4.1)
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bapo_openrlhf.training.wire.packing import Piece

LORA = ".lora_"  # in PEFT's name of a part of an adapter
_PART = re.compile(r"(.+)\.(base_layer|lora_A\.default|lora_B\.default)\.weight")


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

    rebuild, arguments = handles[get_physical_gpu_id()]
    arguments = list(arguments)
    arguments[6] = worker.device.index  # the number of the GPU in this process, which may see other GPUs
    load(worker, pieces, rebuild(*arguments))
    torch.cuda.synchronize()  # the memory is the actor's again after this


def load(worker: Any, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
    """Load the tensors of a parcel into a worker's model.

    Raises:
        RuntimeError: The tensors have another dtype than vLLM's model, or the model has no weight of these names.
    """
    adapters = all(LORA in name for name, _ in pieces)  # DeepSpeed may keep them in float32
    if flat.dtype != worker.model_config.dtype and not adapters:
        raise RuntimeError(f"weights are {flat.dtype} in the actor and {worker.model_config.dtype} in vLLM")
    parts = flat.split([math.prod(shape) for _, shape in pieces])
    weights = [(name, part.view(shape)) for (name, shape), part in zip(pieces, parts, strict=True)]
    names = worker.model_runner.model.load_weights(weights=weights)
    if names is not None and not names:
        raise RuntimeError(f"vLLM has none of the actor's weights {', '.join(name for name, _ in pieces)}")


class MergingLoader:
    """Takes the place of `load_weights` of a vLLM model, in which every sync ends. `scale` is alpha / r."""

    def __init__(self, load: Callable[..., Any], scale: float) -> None:
        self.load, self.scale = load, scale
        self.parts: dict[str, dict[str, torch.Tensor]] = {}  # parts that have come, by layer

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load the weights that are complete, and hold the others. Returns None if there were none to load.

        Raises:
            RuntimeError: A tensor belongs to an adapter of another kind.
        """
        pairs = list(self.merged(weights))
        return self.load(weights=pairs) if pairs else None

    def merged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names of the model without adapters."""
        for name, tensor in weights:
            name = name.removeprefix("base_model.model.")  # PEFT puts it before each name
            match = _PART.fullmatch(name)
            if match:
                layer, part = match.groups()
                parts = self.parts.setdefault(layer, {})
                parts[part] = tensor.clone()  # because the sender may use the memory again
                if len(parts) == 3:
                    base, a, b = (parts[part] for part in ("base_layer", "lora_A.default", "lora_B.default"))
                    del self.parts[layer]
                    yield f"{layer}.weight", (base.float() + self.scale * (b.float() @ a.float())).to(base.dtype)
            elif LORA in name:
                raise RuntimeError(f"{name} cannot be merged; adapters must be those of linear layers")
            else:
                yield name.replace(".base_layer.", "."), tensor


def merge_adapters(worker: Any, scale: float) -> None:
    """Let a vLLM worker merge adapters from now on."""
    model = worker.model_runner.model
    model.load_weights = MergingLoader(model.load_weights, scale)


def require_merged(worker: Any) -> None:
    """Raise RuntimeError if a sync has left a part of an adapter behind. A worker that merges none has none."""
    layers: dict[str, dict[str, torch.Tensor]] = getattr(worker.model_runner.model.load_weights, "parts", {})
    for layer, parts in layers.items():
        raise RuntimeError(
            f"of {layer} only {', '.join(sorted(parts))} reached the engine, so its adapter cannot be merged "
            "(ds.lora.target_modules)"
        )

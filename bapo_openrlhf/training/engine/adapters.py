"""LoRA: the rollout engines merge the actor's adapters into the weights that they sample from.

With `--ds.lora.rank` the weight sync sends tensors under PEFT's names, which vLLM's model does not have. Here each vLLM
worker holds the frozen weight of a layer until both factors of its adapter have come, and needs the memory of one more
layer for that. It then loads their sum, in the layer's own name:

    W + alpha / r * B A    (LoRA, arXiv 2106.09685, Sec. 4.1)
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Weights = Iterable[tuple[str, torch.Tensor]]

PREFIX = "base_model.model."  # what PEFT puts before each name
_PART = re.compile(r"(.+)\.(base_layer|lora_A\.default|lora_B\.default)\.weight")


def is_adapter(name: str) -> bool:
    """Whether this is PEFT's name of a part of an adapter."""
    return ".lora_" in name


class MergingLoader:
    """Takes the place of `load_weights` of a vLLM model, in which every sync ends. `scale` is alpha / r."""

    def __init__(self, load: Callable[..., Any], scale: float) -> None:
        self.load, self.scale = load, scale
        self.held: dict[str, dict[str, torch.Tensor]] = {}  # parts that have come, by layer

    def __call__(self, weights: Weights) -> set[str] | None:
        """Load the weights that are complete, and hold the others. Returns None if there were none to load.

        Raises:
            RuntimeError: A tensor belongs to an adapter of another kind.
        """
        complete = list(self.merged(weights))
        return self.load(weights=complete) if complete else None

    def merged(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names of the model without adapters."""
        for name, tensor in weights:
            name = name.removeprefix(PREFIX)
            match = _PART.fullmatch(name)
            if match:
                yield from self._merge(match[1], match[2], tensor)
            elif is_adapter(name):
                raise RuntimeError(f"{name} cannot be merged; adapters must be those of linear layers")
            else:
                yield name.replace(".base_layer.", "."), tensor

    def _merge(self, layer: str, part: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        parts = self.held.setdefault(layer, {})
        parts[part] = tensor.clone()  # because the sender may use the memory again
        if len(parts) == 3:
            base, a, b = (parts[part] for part in ("base_layer", "lora_A.default", "lora_B.default"))
            del self.held[layer]
            yield f"{layer}.weight", (base.float() + self.scale * (b.float() @ a.float())).to(base.dtype)


def merge_adapters(worker: Any, scale: float) -> None:
    """Let a vLLM worker merge adapters from now on."""
    model = worker.model_runner.model
    model.load_weights = MergingLoader(model.load_weights, scale)


def require_merged(worker: Any) -> None:
    """Raise RuntimeError if a sync has left a part of an adapter behind. A worker that merges none has none."""
    held: dict[str, dict[str, torch.Tensor]] = getattr(worker.model_runner.model.load_weights, "held", {})
    for layer, parts in held.items():
        raise RuntimeError(
            f"of {layer} only {', '.join(sorted(parts))} reached the engine, so its adapter cannot be merged "
            "(ds.lora.target_modules)"
        )

"""Means of a training's numbers over micro-batches and ranks."""

from typing import Any

import torch
import torch.distributed as dist


class Means:
    """Weighted means of numbers over micro-batches and ranks. Nothing waits for the GPU before `reduced`."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, name: str, value: torch.Tensor | float, weight: float) -> None:
        """Count a number, without dimensions, with a weight. A number with the weight 0 may be nan."""
        number = value.detach().double() if isinstance(value, torch.Tensor) else value
        self._sums[name] = self._sums.get(name, 0.0) + (number * weight if weight else 0.0)
        self._weights[name] = self._weights.get(name, 0.0) + weight

    @property
    def names(self) -> list[str]:
        """Names of the numbers, in order."""
        return sorted(self._sums)

    def reduced(self, device: Any) -> dict[str, float]:
        """The means over all ranks, by name, of what has any weight. All ranks must call this, with the same names."""
        names = self.names
        numbers = [self._sums[name] for name in names] + [self._weights[name] for name in names]
        vector = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
        dist.all_reduce(vector)
        sums, weights = vector.view(2, -1).tolist()
        return {name: total / weight for name, total, weight in zip(names, sums, weights, strict=True) if weight}

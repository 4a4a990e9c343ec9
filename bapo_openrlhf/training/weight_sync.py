"""The actor's weights to the engines in few large messages.

OpenRLHF sends each tensor by itself: a call to each engine and a broadcast, and vLLM looks through all of its model's
parameters for each. Here OpenRLHF's loop over the tensors goes on (it gathers them from ZeRO-3 shards or from
tensor-parallel ranks, and leaves frozen parts out), but what it sends is collected and leaves in parcels. Not where
actor and engine share a GPU and hand memory over (CUDA IPC), nor with `vllm.sync_with_ray`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
import torch

PARCEL_BYTES = 256 * 2**20  # at most; each engine holds one during a sync, the actor's rank 0 two

Piece = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor in a parcel, in its order."""


class Parcels:
    """Stands in for the engines and for the process group that OpenRLHF's actor sends each tensor to.

    Args:
        engines: handles of the engines.
        group: with `broadcast(tensor, src, stream)`; every engine's workers are in it.
        limit: bytes of a parcel. A larger tensor is one of its own.
    """

    def __init__(self, engines: Sequence[Any], group: Any, limit: int) -> None:
        self._real, self._group, self._limit = engines, group, limit
        self._announced: Piece = ("", ())
        self._pieces: list[Piece] = []
        self._tensors: list[torch.Tensor] = []  # flat copies, one for each piece
        self._bytes = 0
        self._nothing_to_wait_for = ray.put(None)
        self.engines = [_Engine(engine, self._announce) for engine in engines]

    def _announce(self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False) -> Any:
        self._announced = (name, tuple(shape))
        return self._nothing_to_wait_for

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Put the tensor that was announced last into the parcel; its memory may be gone after the call."""
        flat = tensor.reshape(-1)
        if self._bytes + flat.nbytes > self._limit or (self._tensors and self._tensors[0].dtype != flat.dtype):
            self.send()
        if flat.nbytes > self._limit:
            self._send([self._announced], flat)
            return
        self._pieces.append(self._announced)
        self._tensors.append(flat.clone())
        self._bytes += flat.nbytes

    def send(self) -> None:
        """Send what has been collected, and wait until the engines have loaded it."""
        if self._pieces:
            self._send(self._pieces, torch.cat(self._tensors))
        self._pieces, self._tensors, self._bytes = [], [], 0

    def _send(self, pieces: list[Piece], flat: torch.Tensor) -> None:
        loaded = [engine.update_weights.remote(pieces, flat.dtype) for engine in self._real]
        self._group.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        ray.get(loaded)


class _Engine:
    """An engine's handle, whose `update_weight` only says what comes next."""

    def __init__(self, engine: Any, announce: Any) -> None:
        self._engine = engine
        self.update_weight = SimpleNamespace(remote=announce)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextmanager
def in_parcels(trainer: Any) -> Iterator[None]:
    """Within the block, what OpenRLHF's actor trainer sends to the engines goes in parcels, if it is rank 0's."""
    group = getattr(trainer, "_model_update_group", None)  # rank 0 alone has one
    if trainer.use_cuda_ipc or not hasattr(group, "broadcast"):  # a name, with vllm.sync_with_ray
        yield
        return
    engines = trainer.vllm_engines
    parcels = Parcels(engines, group, PARCEL_BYTES)
    trainer.vllm_engines, trainer._model_update_group = parcels.engines, parcels
    try:
        yield
        parcels.send()
    finally:
        trainer.vllm_engines, trainer._model_update_group = engines, group


def receive(worker: Any, pieces: Sequence[Piece], dtype: torch.dtype) -> None:
    """In a vLLM worker: receive a parcel and load it.

    Raises:
        RuntimeError: the tensors have another dtype than vLLM's model, or it has no weight of these names.
    """
    # Received before it is checked: a sender with no receiver would wait until the group's timeout, not fail.
    flat = torch.empty(sum(math.prod(shape) for _, shape in pieces), dtype=dtype, device=worker.device)
    worker._model_update_group.broadcast(flat, src=0, stream=torch.cuda.current_stream() if flat.is_cuda else None)
    if dtype != worker.model_config.dtype:
        raise RuntimeError(f"weights are {dtype} in the actor and {worker.model_config.dtype} in vLLM")
    parts = flat.split([math.prod(shape) for _, shape in pieces])
    weights = [(name, part.view(shape)) for (name, shape), part in zip(pieces, parts, strict=True)]
    loaded = worker.model_runner.model.load_weights(weights=weights)
    if loaded is not None and not loaded:
        raise RuntimeError(f"vLLM has none of the actor's weights {', '.join(name for name, _ in pieces)}")

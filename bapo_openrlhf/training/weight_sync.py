"""Send the actor's weights to the engines in few large messages.

OpenRLHF sends each tensor by itself, with a call to each engine and a broadcast, and for each tensor vLLM looks through
all parameters of its model. Here OpenRLHF still loops over the tensors: it gathers them from ZeRO-3 shards or from
tensor-parallel ranks, and leaves frozen parts out. But what it sends is collected and leaves in parcels: one message
with many tensors. This is not done if actor and engine share a GPU and hand memory over (CUDA IPC), and not with
`vllm.sync_with_ray`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
import torch

from bapo_openrlhf.training.adapters import is_adapter

PARCEL_BYTES = 256 * 2**20  # limit; during a sync each engine holds one parcel, and rank 0 of the actor two

Piece = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor in a parcel."""


class ChangedHandle:
    """The handle of an engine. Some of its methods are replaced by functions of this process.

    Args:
        engine: Handle of the engine.
        methods: A function for each replaced method.
    """

    def __init__(self, engine: Any, **methods: Callable[..., Any]) -> None:
        self._engine = engine
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Parcels:
    """Takes the place of the engines and of the process group to which OpenRLHF's actor sends each tensor.

    Args:
        engines: Handles of the engines.
        group: Process group with `broadcast(tensor, src, stream)`; the workers of all engines are in it.
        limit: Largest number of bytes in a parcel. A tensor that is larger gets a parcel of its own.
    """

    def __init__(self, engines: Sequence[Any], group: Any, limit: int) -> None:
        self._real, self._group, self._limit = engines, group, limit
        self._announced: Piece = ("", ())
        self._pieces: list[Piece] = []
        self._tensors: list[torch.Tensor] = []  # a flat copy for each piece
        self._bytes = 0
        self._nothing_to_wait_for = ray.put(None)
        # Their `update_weight` only announces the next tensor.
        self.engines = [ChangedHandle(engine, update_weight=self._announce) for engine in engines]

    def _announce(self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False) -> Any:
        self._announced = (name, tuple(shape))
        return self._nothing_to_wait_for

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Copy the tensor that was announced last into the parcel, because OpenRLHF may free it after the call."""
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
        """Send the collected tensors, and wait until the engines have loaded them."""
        if self._pieces:
            self._send(self._pieces, torch.cat(self._tensors))
        self._pieces, self._tensors, self._bytes = [], [], 0

    def _send(self, pieces: list[Piece], flat: torch.Tensor) -> None:
        loaded = [engine.update_weights.remote(pieces, flat.dtype) for engine in self._real]
        self._group.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        ray.get(loaded)


@contextmanager
def in_parcels(trainer: Any) -> Iterator[None]:
    """Within the block, OpenRLHF's actor trainer sends its weights to the engines in parcels. Only rank 0 sends any."""
    group = getattr(trainer, "_model_update_group", None)  # only rank 0 has one
    if trainer.use_cuda_ipc or not hasattr(group, "broadcast"):  # with vllm.sync_with_ray it is a name
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
    """Receive a parcel in a vLLM worker and load it.

    Args:
        worker: The vLLM worker.
        pieces: Names and shapes of the tensors in the parcel, in its order.
        dtype: Type of the tensors.

    Raises:
        RuntimeError: The tensors have another dtype than vLLM's model, or the model has no weight of these names.
    """
    # Receive before checking, because a sender without a receiver would not fail but wait until the group's timeout.
    flat = torch.empty(sum(math.prod(shape) for _, shape in pieces), dtype=dtype, device=worker.device)
    worker._model_update_group.broadcast(flat, src=0, stream=torch.cuda.current_stream() if flat.is_cuda else None)
    adapters = all(is_adapter(name) for name, _ in pieces)  # DeepSpeed may keep them in float32
    if dtype != worker.model_config.dtype and not adapters:
        raise RuntimeError(f"weights are {dtype} in the actor and {worker.model_config.dtype} in vLLM")
    parts = flat.split([math.prod(shape) for _, shape in pieces])
    weights = [(name, part.view(shape)) for (name, shape), part in zip(pieces, parts, strict=True)]
    loaded = worker.model_runner.model.load_weights(weights=weights)
    if loaded is not None and not loaded:
        raise RuntimeError(f"vLLM has none of the actor's weights {', '.join(name for name, _ in pieces)}")

"""Send the actor's weights to the engines in parcels, few large messages with many tensors each.

OpenRLHF sends each tensor by itself, with a call to each engine, and for each tensor vLLM looks through all parameters
of its model. On a GPU that actor and engine share, a sync of a tiny model took 0.7 s so (docs/performance.md#on-a-gpu).
There the engine opens the memory of a parcel (CUDA IPC). Otherwise rank 0 of the actor broadcasts it. The vision tower
of a model with images stays out, because it is frozen. With `vllm.sync_with_ray`, or without `weights` among
`run.faster`, the sync is OpenRLHF's own.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import ray
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from torch.multiprocessing.reductions import reduce_tensor

from bapo_openrlhf.host import extends
from bapo_openrlhf.training.wire.packing import Piece

PARCEL_BYTES = 256 * 2**20  # limit; during a sync each engine holds one parcel, and a rank of the actor two


def parcels(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[tuple[list[Piece], torch.Tensor]]:
    """Collect tensors in parcels of at most `limit` bytes. A larger one has a parcel of its own, without a copy.

    A parcel is tensors of one dtype, one after the other: their names and shapes, and all numbers, of shape (N,). It
    holds until the next one is asked for. A tensor is copied before the next one is asked for, because a gathered
    tensor is then gone.
    """
    pieces: list[Piece] = []
    copies: list[torch.Tensor] = []
    size = 0  # bytes of the copies
    for name, tensor in tensors:
        flat, piece = tensor.reshape(-1), (name, tuple(tensor.shape))
        if copies and (size + flat.nbytes > limit or copies[0].dtype != flat.dtype):
            yield pieces, torch.cat(copies)
            pieces, copies, size = [], [], 0
        if flat.nbytes > limit:
            yield [piece], flat
        else:
            pieces.append(piece)
            copies.append(flat.clone())
            size += flat.nbytes
    if copies:
        yield pieces, torch.cat(copies)


class ParcelActorTrainer(ActorPPOTrainer):
    """OpenRLHF's actor trainer, which sends its weights in parcels."""

    @extends(ActorPPOTrainer)
    def broadcast_to_vllm(self) -> None:
        """Send all weights to all engines, and wait until they are loaded. All ranks must call this."""
        args, first = self.strategy.args, dist.get_rank() == 0
        if args.vllm.sync_with_ray or not args.run.does_faster("weights"):
            super().broadcast_to_vllm()
            return
        resets = []
        if first and args.vllm.enable_prefix_caching:
            resets = [engine.reset_prefix_cache.remote() for engine in self.vllm_engines]
        torch.cuda.empty_cache()
        if self.use_cuda_ipc or first:
            send = self._lend if self.use_cuda_ipc else self._broadcast
            for pieces, flat in parcels(self._gathered(), PARCEL_BYTES):
                send(pieces, flat)
        else:
            for _ in self._gathered():  # the other ranks only take part in the gathering
                pass
        ray.get(resets)
        torch.cuda.empty_cache()
        torch_dist_barrier_and_cuda_sync()

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and weight of each tensor that the engines get. A weight is whole until the next one is asked for."""
        for name, parameter in self.actor.model.module.named_parameters():
            if parameter.requires_grad or not self.actor.is_vlm:
                with self._gathering(parameter):
                    yield name, parameter.data

    def _gathering(self, parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
        """Within the block, a parameter that ZeRO-3 or tensor parallelism has cut is whole."""
        ds = self.strategy.args.ds
        if ds.tensor_parallel_size > 1:
            return GatherReplacedLayerParams([parameter], self.actor.model.module, enabled=True)
        return deepspeed.zero.GatheredParameters([parameter], enabled=ds.zero_stage == 3)

    def _broadcast(self, pieces: list[Piece], flat: torch.Tensor) -> None:
        """Send a parcel from rank 0 to all engines."""
        loaded = [engine.update_weights.remote(pieces, flat.dtype) for engine in self.vllm_engines]
        self._model_update_group.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        ray.get(loaded)

    def _lend(self, pieces: list[Piece], flat: torch.Tensor) -> None:
        """Let each engine's worker load a parcel from the memory of the rank that is on its GPU. All ranks have it."""
        handles: list[Any] = [None] * dist.get_world_size()
        torch_dist_barrier_and_cuda_sync()  # the copies are complete
        dist.all_gather_object(handles, (get_physical_gpu_id(), reduce_tensor(flat)))
        if dist.get_rank() == 0:
            ray.get([engine.borrow_weights.remote(pieces, dict(handles)) for engine in self.vllm_engines])
        torch_dist_barrier_and_cuda_sync()  # no rank uses the memory again before all engines have read it

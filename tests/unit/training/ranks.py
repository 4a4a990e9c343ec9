"""Data-parallel ranks as threads; their collectives meet at a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from bapo_openrlhf.training.worker import shards, updates, whole_batch


class Ranks:
    """The part of torch.distributed, and of OpenRLHF's strategy, that trains on batches: `count` threads in step."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)  # a rank that asks for one collective more waits for ever
        self.rank = threading.local()
        self.given: list = [None] * count

    def get_world_size(self, group=None) -> int:
        return self.count

    def all_reduce(self, tensor: torch.Tensor, op=torch.distributed.ReduceOp.SUM, group=None) -> None:
        self.given[self.rank.number] = tensor.clone()
        self.barrier.wait()
        assert len({(tuple(value.shape), value.dtype) for value in self.given}) == 1
        stacked = torch.stack(self.given)
        self.barrier.wait()
        tensor.copy_({self.ReduceOp.SUM: stacked.sum, self.ReduceOp.MAX: stacked.amax}[op](0))

    def strategy(self, args: SimpleNamespace) -> SimpleNamespace:
        """The strategy of each rank."""
        return SimpleNamespace(
            args=args,
            ds_device_mesh={"dp": SimpleNamespace(get_group=lambda: None)},
            ring_attn_group=None,
            is_rank_0=lambda: False,
        )

    def run(self, work) -> list:
        """The results of `work(rank)` of all ranks."""

        def start(number):
            self.rank.number = number
            try:
                return work(number)
            except Exception:
                self.barrier.abort()  # the others wait for this rank
                raise

        before = updates.dist, whole_batch.dist, shards.dist
        updates.dist = whole_batch.dist = shards.dist = self
        try:
            with ThreadPoolExecutor(self.count) as threads:
                return list(threads.map(start, range(self.count)))
        finally:
            updates.dist, whole_batch.dist, shards.dist = before


def arguments(window: int, tokens: int | None = None, *, skips: bool = False) -> SimpleNamespace:
    """Arguments of a run with optimizer steps of `window` samples, and with micro-batches of so many tokens."""
    return SimpleNamespace(
        train=SimpleNamespace(
            batch_size=window, max_tokens_per_gpu=tokens, dynamic_batch_enable=tokens is not None, max_epochs=1
        ),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
        adapt=SimpleNamespace(micro_batch_tokens=None, skip_zero_advantage=skips, veto_ratio=None, reuse_gate=None),
    )

"""Counts the operations for which Python would wait for a GPU."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Their answer, or its size, depends on the numbers in a tensor.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "unique_dim"}


class Waits(TorchDispatchMode):
    """Counts these operations within the block. On a GPU, torch.cuda.set_sync_debug_mode does it.

    A copy between devices is not counted, because everything here is on the CPU.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in WAITING or any(index is not None and index.dtype == torch.bool for index in indices):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

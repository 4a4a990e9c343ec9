"""What a missing GPU takes in torch and DeepSpeed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from bapo_openrlhf.cpu.patching import replaces


def _current_device() -> Any:
    """Replaces `torch.cuda.current_device`, which OpenRLHF uses only in `.to(...)` and `device=...`."""
    import torch

    return torch.device("cpu")


@replaces("torch.cuda", "current_device", "synchronize", "empty_cache", "set_device", "current_stream")
def torch_cuda(module: ModuleType) -> None:
    """Give OpenRLHF's calls of `torch.cuda` a result without a GPU."""
    module.current_device = _current_device
    for name in ("synchronize", "empty_cache", "set_device", "current_stream"):
        # Each name gets a function of its own, because torch keeps a table of its functions.
        setattr(module, name, lambda *args, **kwargs: None)


@replaces("deepspeed.comm.torch", "build_shm_op")
def deepspeed_comm(module: ModuleType) -> None:
    """Skip the shared-memory collective. It is compiled on first use, and only tensor-parallel inference calls it."""
    module.build_shm_op = lambda: None

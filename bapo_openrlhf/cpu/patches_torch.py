"""What a missing GPU takes in torch and DeepSpeed."""

from typing import Any

from bapo_openrlhf.cpu.patching import replaces


@replaces("torch.cuda", "current_device")
def current_device(_original: Any) -> Any:
    """The CPU. OpenRLHF uses the current device only in `.to(...)` and `device=...`."""
    import torch

    return torch.device("cpu")


@replaces("torch.cuda", "synchronize")
@replaces("torch.cuda", "empty_cache")
@replaces("torch.cuda", "set_device")
@replaces("torch.cuda", "current_stream")
def nothing(_original: Any, *_args: Any, **_kwargs: Any) -> None:
    """Has no meaning without a GPU."""


@replaces("deepspeed.comm.torch", "build_shm_op")
def build_shm_op(_original: Any) -> None:
    """Skip the shared-memory collective. It is compiled on first use, and only tensor-parallel inference calls it."""

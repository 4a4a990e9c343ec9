"""What a missing GPU takes in torch and DeepSpeed."""

from typing import Any

from bapo_openrlhf.cpu.patching import replaces


@replaces("torch.cuda", "current_device")
def current_device(_original: Any) -> Any:
    """The CPU. OpenRLHF uses it in `.to(...)`, `device=...`, and what patches_openrlhf replaces."""
    import torch

    return torch.device("cpu")


@replaces("torch.cuda", "synchronize")
@replaces("torch.cuda", "empty_cache")
@replaces("torch.cuda", "set_device")
@replaces("torch.cuda", "current_stream")
def nothing(_original: Any, *_args: Any, **_kwargs: Any) -> None:
    """Has no meaning without a GPU."""


@replaces("torch", "use_deterministic_algorithms")
def use_deterministic_algorithms(original: Any, *args: Any, **kwargs: Any) -> None:
    """Do not also fill new memory: DeepSpeed takes 1 GB for each micro-batch, and uses little of it."""
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False
    original(*args, **kwargs)


@replaces("deepspeed.comm.torch", "build_shm_op")
def build_shm_op(_original: Any) -> None:
    """Skip the shared-memory collective. It is compiled on first use, and only tensor-parallel inference calls it."""


@replaces("deepspeed.runtime.zero.partition_parameters", "Init._allgather_params_coalesced")
def gather_parameters(_original: Any, self: Any, params: list[Any], hierarchy: int = 0, quantize: bool = False) -> None:
    """Gather parameters one by one (ZeRO stage 3): DeepSpeed waits only for the last, and gloo keeps no order."""
    self._allgather_params_sequential(params, hierarchy)

"""What a missing GPU takes in OpenRLHF, and in torch and DeepSpeed below it."""

from typing import Any

from bapo_openrlhf import flash_attention
from bapo_openrlhf.cpu.patching import AROUND, replaces, require
from bapo_openrlhf.cpu.threads import use_threads

AROUND[flash_attention.IMPORTS_IT] = flash_attention.stand_ins


@replaces("openrlhf.utils.deepspeed.deepspeed", "init_device_mesh")
def init_device_mesh(original: Any, _device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Put the device mesh on the CPU."""
    return original("cpu", *args, **kwargs)


@replaces("openrlhf.utils.deepspeed.deepspeed", "get_train_ds_config")
def get_train_ds_config(original: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Take torch's AdamW, with the same update, because DeepSpeed's compiles for 40 s. Fused, it needs less memory."""
    ds_config = original(*args, **kwargs)
    optimizer = ds_config.get("optimizer")
    if optimizer is not None and optimizer["type"] in ("Adam", "AdamW"):
        ds_config["optimizer"] = {**optimizer, "params": {**optimizer["params"], "torch_adam": True, "fused": True}}
    return ds_config


@replaces("openrlhf.utils.deepspeed.deepspeed", "DeepspeedStrategy.prepare")
def prepare(original: Any, self: Any, *models: Any) -> Any:
    """Prepare the models, and give this process its share of the cores. Actor and critic train at the same time."""
    result = original(self, *models)
    model = models[0][0] if isinstance(models[0], tuple) else models[0]
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    critic = getattr(self.args, "critic", None)  # supervised training has none
    kinds = 2 if critic and critic.model_name_or_path else 1
    use_threads(parameters, self.world_size * kinds)
    return result


@replaces("openrlhf.utils.deepspeed.deepspeed", "DeepspeedStrategy.moving_average")
def moving_average(original: Any, self: Any, model: Any, model_ema: Any, beta: float, _device: str) -> None:
    """Make the moving average on the CPU. The trainer passes the literal "cuda"."""
    original(self, model, model_ema, beta, "cpu")


@replaces("openrlhf.trainer.ppo_utils.replay_buffer", "NaiveReplayBuffer.__init__")
def replay_buffer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`NaiveReplayBuffer` builds `torch.device(f"cuda:{torch.cuda.current_device()}")`, which needs a number."""
    import torch

    device = torch.cuda.current_device
    torch.cuda.current_device = lambda: 0
    try:
        original(self, *args, **kwargs)
    finally:
        torch.cuda.current_device = device


class _GlooGroup:
    """The part of vLLM's NCCL communicator that weight sync uses, over gloo."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: Any, src: int, stream: None = None) -> None:
        self.group.broadcast(tensor, src).wait()


@replaces("openrlhf.utils.distributed_util", "stateless_init_process_group")
def process_group(_original: Any, address: str, port: int, rank: int, world_size: int, _device: Any) -> _GlooGroup:
    """Send the weights to vLLM over gloo."""
    import vllm.distributed.utils as vllm_utils

    make = require(vllm_utils, "stateless_init_torch_distributed_process_group")
    return _GlooGroup(make(address, port, rank, world_size, backend="gloo"))


@replaces("openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer._init_vllm_sync_group")
def init_vllm_sync_group(original: Any, self: Any, backend: str) -> None:
    """Wait for the engines first, because gloo would wait half an hour for an engine that failed to start."""
    import ray

    ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
    original(self, backend)


@replaces("openrlhf.trainer.ray.vllm_worker_wrap", "WorkerWrap.update_weight")
def update_weight(_original: Any, self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
    """Receive one tensor from rank 0 of the actor and load it: the original with "cpu" instead of "cuda"."""
    import torch

    # Receive before checking: without a receiver the sender would wait for the timeout of the group.
    weight = torch.empty(shape, dtype=dtype, device="cpu")
    self._model_update_group.broadcast(weight, src=0)
    if dtype != self.model_config.dtype:
        raise RuntimeError(f"weight {name!r} is {dtype} in the actor and {self.model_config.dtype} in vLLM")
    loaded = self.model_runner.model.load_weights(weights=[(name, weight)])
    if loaded is not None and not loaded:
        raise RuntimeError(f"vLLM has no weight for the actor's {name!r}")


# ── torch and DeepSpeed ──


@replaces("torch.cuda", "current_device")
def current_device(_original: Any) -> Any:
    """The CPU. OpenRLHF uses it in `.to(...)`, `device=...`, and what is replaced above."""
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

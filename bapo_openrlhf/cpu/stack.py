"""Runs OpenRLHF's real stack (Ray, DeepSpeed, vLLM) on a machine without a GPU.

OpenRLHF is written for CUDA. The files `patches_*.py` replace a few names in every process of a run, and everything
else stays OpenRLHF's and DeepSpeed's own. Ray runs `set_up_ray_worker` in each worker (`worker_process_setup_hook`),
and vLLM runs `vllm_plugin` in each of its processes (entry point `vllm.general_plugins`). Both only set an import hook
(`patching.py`).

A run needs these flags: `--vllm.enforce_eager --vllm.sync_backend gloo --ds.attn_implementation eager`. Impossible
without a GPU are CUDA-IPC sync (`--train.colocate_all` uses it unless the sync backend is gloo), sync through Ray
collectives (`--vllm.sync_with_ray`), flash-attention, packing (`--ds.packing_samples`) and with it dynamic batching and
ring attention, the sleep modes of vLLM and DeepSpeed, and models with convolutions or mixtures of experts.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bapo_openrlhf.cpu import patches_openrlhf, patches_vllm, patching, products, threads  # noqa: F401 - they register
from bapo_openrlhf.cpu.prefork import server, serving
from bapo_openrlhf.errors import ConfigError

SWITCH = "BAPO_OPENRLHF_CPU"
FORK = "BAPO_OPENRLHF_FORK"  # 0: each process imports the stack itself
SHARED_RAY = "BAPO_OPENRLHF_RAY"  # address of a Ray on this machine that several runs share (launch/start.py)


def active() -> bool:
    """Whether this run is on the CPU: `BAPO_OPENRLHF_CPU` is 1, or it is unset or "auto" and torch finds no GPU."""
    switch = os.environ.get(SWITCH, "auto").strip().lower()
    if switch in ("0", "1"):
        return switch == "1"
    if switch not in ("", "auto"):
        raise ConfigError(f"{SWITCH} is {switch!r}; allowed: 1 (on the CPU), 0 (not), auto (on the CPU if no GPU)")
    # Otherwise torch's answer makes CUDA unusable in forked processes. vLLM's own setting would come too late.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return not torch.cuda.is_available()


# ── Environment ──


def _defaults() -> dict[str, str]:
    return {
        SWITCH: "1",
        products.SWITCH: products.requested_way(),
        "DS_ACCELERATOR": "cpu",
        threads.LIMIT: str(threads.limit()),
        # A process starts with one thread, and may take more once it knows the size of its model (`threads.py`).
        "OMP_NUM_THREADS": "1",
        **threads.WAIT_PASSIVELY,
        # OpenRLHF compiles its entropy function. On the CPU this takes half a minute of C++ compilation per process.
        "TORCHDYNAMO_DISABLE": "1",
        # All processes are on this machine, so the collectives need no other interface and no name look-up.
        "GLOO_SOCKET_IFNAME": "lo",
        # vLLM and transformers ask the model hub even about local models. This costs seconds, or minutes of retries
        # without a network. A run with a model or data set from the hub sets both to 0.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # In GiB. Otherwise vLLM takes `--vllm.gpu_memory_utilization` of the whole main memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Binding threads to cores would put every process of the run on the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Otherwise vLLM starts one more process for its worker, only to bind threads.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # OpenRLHF sets this to 1 when it starts Ray itself. Tensors then arrive in read-only shared memory. On a GPU
        # they are copied to the device next. Here `.to(device)` copies nothing, and a write would be undefined.
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0",
        "TOKENIZERS_PARALLELISM": "true",  # as OpenRLHF sets it when it starts Ray itself
        # Otherwise about a dozen warnings per process would only say that there is no GPU.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for memory in pages of 2 MiB
        # No usage reports.
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def prepare_environment() -> None:
    """Set the environment of a CPU run, and keep what is set, before ray, deepspeed or vllm reads it at import."""
    if not active():
        return
    os.environ[SWITCH] = "1"
    for name, value in _defaults().items():
        os.environ.setdefault(name, value)


def ray_init_kwargs(num_logical_gpus: int) -> dict[str, Any]:
    """Arguments of `ray.init` for a Ray with so many devices. Ray never checks that a declared device exists."""
    if os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}, but a run on the CPU starts a Ray of its own. Unset it, "
            f"or set {SWITCH}=0 if that cluster has GPUs and only this machine has none."
        )
    prepare_environment()
    address = os.environ.get(SHARED_RAY)
    settings = {
        "address": "local",
        "num_gpus": num_logical_gpus,
        # One per device, plus a few for the trainer and for remote functions.
        "num_cpus": num_logical_gpus + 4,
        "object_store_memory": 512 * 1024**2,
        "include_dashboard": False,
    }
    return {
        **({"address": address} if address else settings),
        "logging_level": "warning",
        "runtime_env": {
            "worker_process_setup_hook": "bapo_openrlhf.cpu.stack.set_up_ray_worker",
            "env_vars": {name: os.environ[name] for name in _defaults()} | serving.environment(),
            "py_executable": serving.python(),
        },
    }


# ── Start ──


def install() -> None:
    """Patch this process, which is the driver, a Ray worker or one of vLLM's; nothing unless `active()`."""
    if not active() or not patching.install():
        return
    threads.keep_memory()
    # Start-up is mostly imports, and a fifth of it would go to collecting garbage after every 700 new objects.
    gc.set_threshold(100_000, 20, 20)
    # OpenRLHF asks for pinned memory everywhere, and torchdata calls set_vital on every import.
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator is found")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


def set_up_ray_worker() -> None:
    """Call `install`. Ray runs this first in each worker."""
    install()
    multiprocessing.set_executable(serving.python())  # because vLLM starts its engine with multiprocessing


# What the processes of a run import, without Ray. Ray reads the settings of a worker when it is loaded, so a process
# that has already imported Ray cannot become a worker.
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
    import numpy as np
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    np.random.seed()


def warm_up() -> server.Prepared:
    """Import the stack in the process from which the others fork. It has the environment of a run already."""
    install()
    for name in _STACK:
        importlib.import_module(name)
    if "ray" in sys.modules:
        raise RuntimeError(f"one of {', '.join(_STACK)} imports Ray, which must not be loaded before a fork")
    fixed = _defaults().keys() - {"OMP_NUM_THREADS", threads.LIMIT}  # each process reads these two for itself
    return server.Prepared(fixed=list(fixed), in_child=_in_forked_child)


@contextmanager
def forked_processes() -> Iterator[None]:
    """A block in which CPU runs fork from a process that has imported the stack; a RuntimeError for other versions."""
    prepare_environment()
    if active():
        patching.require_versions(patching.MISSING)  # what is missing is named by the command that imports it
    if not active() or os.environ.get(FORK) == "0":
        yield
        return
    with serving.serving("bapo_openrlhf.cpu.stack:warm_up"):
        yield


def vllm_plugin() -> None:
    """Entry point that vLLM calls in each of its processes. Other uses of vLLM on this machine are not affected."""
    if os.environ.get(SWITCH) == "1":  # as the run's first process set it; Ray hides GPUs from torch in others
        install()

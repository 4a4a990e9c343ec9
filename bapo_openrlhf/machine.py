"""The machine of a process: whether it has a GPU, and what OpenRLHF, Ray and vLLM need there before they are imported.

Everything else asks here. Nothing else imports `cpu/`, which replaces what a missing GPU takes.
"""

from typing import Any

from bapo_openrlhf import flash_attention
from bapo_openrlhf.cpu import products, stack, threads
from bapo_openrlhf.cpu.prefork import client, serving

SHARED_RAY = stack.SHARED_RAY  # the variable that names the Ray that several runs without a GPU share
ALONE = {client.ADDRESS: ""}  # the environment of a process that is not to fork from another one

on_cpu = stack.active  # whether runs on this machine have no GPU
prepare = stack.prepare_environment  # sets the variables of a run, and must come before the stack is imported
processes = stack.forked_processes  # a block in which the processes of runs start as fast as they can
python = serving.python  # the program that starts a process of a run, within such a block or without one


def set_up() -> None:
    """Let this process import OpenRLHF: without a GPU, or without flash-attn."""
    prepare()
    if on_cpu():
        stack.install()
    elif flash_attention.is_missing():
        flash_attention.set_up()


def without_flash_attention() -> bool:
    """Whether runs on GPUs of this machine have a stand-in for flash-attn, so that no samples can be packed."""
    return not on_cpu() and flash_attention.is_missing()


def of_workers() -> dict[str, str]:
    """What the `runtime_env` of a run on GPUs needs so that its Ray workers can import OpenRLHF."""
    hook = {"worker_process_setup_hook": f"{flash_attention.__name__}.set_up"}
    return hook if without_flash_attention() else {}


def own_ray(devices: int) -> dict[str, Any] | None:
    """Arguments of `ray.init` for a Ray whose devices are only counted; None on GPUs, where Ray finds them."""
    return stack.ray_init_kwargs(devices) if on_cpu() else None


def shared_address() -> str:
    """The variable that names the Ray that several runs of this machine share."""
    return SHARED_RAY if on_cpu() else "RAY_ADDRESS"


def share_of_cores(runs: int) -> dict[str, str]:
    """The environment of each of several runs that share the cores. With GPUs there is nothing to share."""
    return {threads.LIMIT: str(max(1, threads.limit() // runs))} if on_cpu() else {}


def bf16_products() -> str | None:
    """The way in which bfloat16 matrices are multiplied without a GPU, which a record keeps; None on GPUs."""
    return products.way() if on_cpu() else None


def engine_settings(tensor_parallel_size: int, *, full_determinism: bool) -> dict[str, Any]:
    """What vLLM's engine is given because of the machine."""
    backend = "mp" if on_cpu() else "ray"  # vLLM has no Ray workers on the CPU
    settings = {"distributed_executor_backend": backend if tensor_parallel_size > 1 else "uni"}
    if not on_cpu():
        # vLLM's other kernels for experts reorder their weights once they are loaded, and a sync writes them in order.
        return settings | {"moe_backend": "triton"}
    # With one sequence at a time a response does not depend on its batch, whose size changes how bf16 rounds on a CPU.
    # On GPUs vLLM has kernels for this (VLLM_BATCH_INVARIANT=1).
    return settings | ({"max_num_seqs": 1} if full_determinism else {})


def offline() -> str:
    """What an error about a model of the hub adds if the hub is not asked."""
    from huggingface_hub.constants import is_offline_mode

    return " (HF_HUB_OFFLINE is set)" if is_offline_mode() else ""

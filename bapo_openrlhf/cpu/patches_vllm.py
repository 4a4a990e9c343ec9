"""What a missing GPU takes in vLLM: weights that can be updated, and a small KV cache."""

from typing import Any

from bapo_openrlhf.cpu.patching import replaces


def _refuse(layer: Any) -> None:
    """Refuse a layer whose weights vLLM repacks for its kernels. Later updates would never reach the packed copy."""
    raise RuntimeError(
        f"vLLM repacks the weights of {type(layer).__name__} on the CPU, so they cannot be kept in step with the "
        "actor. Use a dense model: no mixture of experts, no convolutions."
    )


@replaces("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")
def plain_linear(_original: Any, layer: Any, remove_weight: bool) -> None:
    """Keep `layer.weight` as it is and multiply with it. This replaces vLLM's choice of a CPU kernel.

    vLLM's kernels pack a copy of the weight when the model is loaded. Afterwards linear layers have no parameter into
    which an update could be loaded, and updates of the embedding and the output head do not reach the packed copy.
    """
    import torch

    if layer.weight.ndim != 2:
        _refuse(layer)
    layer.cpu_linear = torch.nn.functional.linear


@replaces("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts.process_weights_after_loading")
def experts(_original: Any, _self: Any, layer: Any) -> None:
    """Refuse mixtures of experts."""
    _refuse(layer)


@replaces("vllm.v1.worker.cpu_worker", "CPUWorker.determine_available_memory", "CPUWorker.get_kv_cache_spec")
def available_memory(original: Any, self: Any) -> int:
    """Size of the KV cache in bytes: only as much as all sequences at full length can fill.

    On the CPU vLLM counts the cache in whole GiB and writes zeros to all of it. This takes 3 s and 1 GiB per engine,
    but a small model needs only a few MiB.
    """
    sequences = self.scheduler_config.max_num_seqs + 1  # one more for the block that vLLM keeps for itself
    one_sequence = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in self.get_kv_cache_spec().values())
    return min(original(self), sequences * one_sequence)

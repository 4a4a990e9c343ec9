"""What a missing GPU takes in vLLM: weights that can be updated, and a small KV cache."""

from typing import Any

from bapo_openrlhf.cpu.patching import replaces
from bapo_openrlhf.cpu.threads import use_threads


def _refuse(layer: Any) -> None:
    """Refuse a layer whose weights vLLM repacks for its kernels. Later updates would never reach the packed copy."""
    raise RuntimeError(
        f"vLLM repacks the weights of {type(layer).__name__} on the CPU, so they cannot be kept in step with the "
        "actor. Use a dense model: no mixture of experts, no convolutions."
    )


@replaces("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")
def plain_linear(_original: Any, layer: Any, remove_weight: bool) -> None:
    """Multiply with `layer.weight`: vLLM's CPU kernels pack a copy of it at the load, which no update reaches."""
    import torch

    if layer.weight.ndim != 2:
        _refuse(layer)
    layer.cpu_linear = torch.nn.functional.linear


@replaces("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts.process_weights_after_loading")
def experts(_original: Any, _self: Any, layer: Any) -> None:
    """Refuse mixtures of experts."""
    _refuse(layer)


@replaces("vllm.engine.arg_utils", "EngineArgs._set_default_chunked_prefill_and_prefix_caching_args")
def whole_prompts(original: Any, self: Any, *args: Any) -> None:
    """Never split a prompt: vLLM sets a request's random numbers back after each part, which no CPU generator can."""
    self.enable_chunked_prefill = False
    original(self, *args)


@replaces("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model")
def load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Load the model, and give this process its share of the cores."""
    original(self, *args, **kwargs)
    parameters = sum(parameter.numel() for parameter in self.model.parameters())
    use_threads(parameters, self.vllm_config.parallel_config.world_size)


@replaces("vllm.v1.worker.cpu_worker", "CPUWorker.determine_available_memory", "CPUWorker.get_kv_cache_spec")
def available_memory(original: Any, self: Any) -> int:
    """Bytes of the KV cache: what all sequences at full length fill. vLLM would zero whole GiB, in 3 s an engine."""
    sequences = self.scheduler_config.max_num_seqs + 1  # one more for the block that vLLM keeps for itself
    one_sequence = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in self.get_kv_cache_spec().values())
    return min(original(self), sequences * one_sequence)


ROWS = 16  # tokens that are drawn at a time, so that their probabilities stay in the processor's cache


def draw(log_probs: Any, numbers: Any) -> Any:
    """The token of each row at which the cumulative probability passes a number, int64 of shape (n,).

    `log_probs` are float32 of shape (n, V), `numbers` float64 of shape (n, 1) from [0, 1). No token of probability 0 is
    drawn. A row that is not all numbers gives any token, so that the engine goes on and the run says what is wrong.
    """
    import torch

    tokens = []
    for rows in range(0, len(log_probs), ROWS):
        # In float32, the sum near 1 would be too coarse to meet the probability of a rare token.
        cumulative = log_probs[rows : rows + ROWS].exp().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        limits = torch.minimum(numbers[rows : rows + ROWS] * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens.append(torch.searchsorted(cumulative, limits, right=True).squeeze(-1).clamp(max=log_probs.shape[1] - 1))
    return torch.cat(tokens)


@replaces("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_cpu")
def sample(_original: Any, self: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any) -> tuple[Any, Any]:
    """Sample with one random number for each token. vLLM's one for each vocabulary entry is as slow as the model."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    numbers = torch.rand(len(logits), 1, dtype=torch.float64)
    for row, generator in generators.items():
        numbers[row] = torch.rand(1, dtype=torch.float64, generator=generator)
    output = {"processed_logits": logits, "processed_logprobs": log_probs}.get(self.logprobs_mode)
    return draw(log_probs, numbers), output


@replaces("vllm.v1.sample.sampler", "batched_count_greater_than")
def ranks(_original: Any, log_probs: Any, _values: Any) -> Any:
    """Count no ranks of the sampled tokens. Nobody reads them, and each takes two passes over the vocabulary."""
    return log_probs.new_zeros(len(log_probs), dtype=int)

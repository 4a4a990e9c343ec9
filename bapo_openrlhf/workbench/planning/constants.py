"""Every number that a plan assumes, in one place, with its unit and its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from bapo_openrlhf.errors import ConfigError

GIB = 2**30
# From the makers' data sheets; the last is vLLM's own default for such a card.
DATA_SHEETS: dict[str, tuple[str, dict[str, Any]]] = {
    "A100": (
        "NVIDIA A100 80GB SXM and DGX A100 data sheets",
        {
            "peak_flops": 312e12,
            "memory_bandwidth": 2.039e12,
            "gpu_bytes": 80 * GIB,
            "link_bandwidth": 300e9,
            "network_bandwidth": 200e9,
            "engine_sequences": 256,
        },
    ),
    "H100": (
        "NVIDIA H100 SXM and DGX H100 data sheets",
        {
            "peak_flops": 989e12,
            "memory_bandwidth": 3.35e12,
            "gpu_bytes": 80 * GIB,
            "link_bandwidth": 450e9,
            "network_bandwidth": 400e9,
            "engine_sequences": 1024,
        },
    ),
    "H200": (
        "NVIDIA H200 SXM and DGX H200 data sheets",
        {
            "peak_flops": 989e12,
            "memory_bandwidth": 4.8e12,
            "gpu_bytes": 141e9,
            "link_bandwidth": 450e9,
            "network_bandwidth": 400e9,
            "engine_sequences": 1024,
        },
    ),
}


def _constant(default: Any, unit: str, meaning: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "source": source})


SHEET = "data sheet"
ASSUMED = "assumption"
STUDY = "GRPO in the Countdown study, benchmarks/results/plan.md"


@dataclass(frozen=True)
class Constants:
    """What a plan is computed from, beside flags and a model's shape. `sources` overrules a field's own source."""

    peak_flops: float = _constant(989e12, "FLOP/s", "of a GPU, bf16, dense", SHEET)
    memory_bandwidth: float = _constant(3.35e12, "bytes/s", "of a GPU's memory", SHEET)
    gpu_bytes: float = _constant(80 * GIB, "bytes", "memory of a GPU", SHEET)
    link_bandwidth: float = _constant(450e9, "bytes/s", "between GPUs of a machine, one direction", SHEET)
    network_bandwidth: float = _constant(400e9, "bytes/s", "between machines, all 8 ports of one together", SHEET)
    gpus_per_machine: int = _constant(8, "GPUs", "of a machine", ASSUMED)
    train_utilisation: float = _constant(0.4, "of peak", "attained in forward and backward passes", ASSUMED)
    forward_utilisation: float = _constant(0.4, "of peak", "attained in forward passes of log-probs, values", ASSUMED)
    prefill_utilisation: float = _constant(0.5, "of peak", "attained by the engines on prompts", ASSUMED)
    decode_utilisation: float = _constant(0.3, "of peak", "attained in decoding, where compute limits it", ASSUMED)
    memory_utilisation: float = _constant(0.6, "of bandwidth", "attained in decoding", ASSUMED)
    network_utilisation: float = _constant(0.7, "of bandwidth", "attained by gathers and weight syncs", ASSUMED)
    engine_sequences: int = _constant(1024, "sequences", "that an engine decodes at once, at most", "vLLM's default")
    engine_reserve_bytes: float = _constant(3 * GIB, "bytes", "of an engine beside weights and KV cache", ASSUMED)
    reserve_bytes: float = _constant(4 * GIB, "bytes", "of a GPU for CUDA, NCCL and fragments", ASSUMED)
    activation_factor: float = _constant(
        34, "bytes per token, layer and hidden unit", "kept for the backward pass", "arXiv 2205.05198, Eq. 1, flash"
    )
    logit_bytes: float = _constant(
        10, "bytes per token and vocabulary entry", "of logits in training: bf16, fp32, fp32 gradient", "OpenRLHF"
    )
    forward_logit_bytes: float = _constant(
        6, "bytes per token and vocabulary entry", "of logits in a forward pass: bf16, fp32", "OpenRLHF"
    )
    stored_token_bytes: float = _constant(
        7.5, "bytes", "of a token in the replay buffer", "measured, benchmarks/results/adaptation.md"
    )
    response_share: float = _constant(0.5, "of rollout.max_new_tokens", "mean length of a response", ASSUMED)
    prompt_share: float = _constant(0.1, "of data.max_len less responses", "mean length of a prompt", ASSUMED)
    signal_share: float = _constant(0.377, "of fresh groups", "whose rewards are not all equal", STUDY)
    gaussian_share: float = _constant(0.455, "of these", "that the gaussian filter would keep", STUDY)
    replayable_share: float = _constant(0.035, "of recent fresh groups", "within c2 and c3, then and today", STUDY)
    hard_share: float = _constant(0.469, "of fresh groups", "with mean reward at most c1", STUDY)
    leaving_share: float = _constant(0.171, "of re-evaluated prompts", "above c1, so that they leave the buffer", STUDY)
    improved_share: float = _constant(0.157, "of re-evaluated prompts", "above c1 with a signal: X2", STUDY)
    sources: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, float, str, str, str]]:
        """(name, value, unit, meaning, source) of each constant."""
        return [
            (
                item.name,
                getattr(self, item.name),
                item.metadata["unit"],
                item.metadata["meaning"],
                self.sources.get(item.name, item.metadata["source"]),
            )
            for item in fields(self)
            if "unit" in item.metadata
        ]

    def replaced(self, source: str, values: Mapping[str, Any]) -> Constants:
        """These constants with some values of another source."""
        return replace(self, **values, sources={**self.sources, **dict.fromkeys(values, source)})


def constants_of(gpu: str) -> Constants:
    """The constants for a kind of GPU.

    Raises:
        ConfigError: it is none of DATA_SHEETS.
    """
    if gpu not in DATA_SHEETS:
        raise ConfigError(f"gpu is {gpu!r}; it must be one of {', '.join(DATA_SHEETS)}")
    sheet, values = DATA_SHEETS[gpu]
    found = Constants().replaced(sheet, values)
    return replace(found, sources={**found.sources, "engine_sequences": f"vLLM's default on {gpu}"})

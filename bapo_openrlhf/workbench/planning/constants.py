"""Every number that a plan assumes, in one place, with its unit and its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from bapo_openrlhf.errors import ConfigError

GIB = 2**30
# From the makers' data sheets, except `engine_sequences`, which is vLLM's own default for such a card. The 4090 stands
# for cards of 24 GB without links of their own: GPUs and machines talk over PCIe 4.0 x16.
_SHEET_NAMES = (
    "peak_flops", "memory_bandwidth", "gpu_bytes", "link_bandwidth", "network_bandwidth", "engine_sequences"
)  # fmt: skip
_SHEETS = {
    "A100": ("NVIDIA A100 80GB SXM and DGX A100 data sheets", 312e12, 2.039e12, 80 * GIB, 300e9, 200e9, 256),
    "H100": ("NVIDIA H100 SXM and DGX H100 data sheets", 989e12, 3.35e12, 80 * GIB, 450e9, 400e9, 1024),
    "H200": ("NVIDIA H200 SXM and DGX H200 data sheets", 989e12, 4.8e12, 141e9, 450e9, 400e9, 1024),
    "4090": ("NVIDIA Ada GPU Architecture white paper, PCIe 4.0 x16", 165e12, 1.008e12, 24 * GIB, 32e9, 32e9, 256),
}
DATA_SHEETS: dict[str, tuple[str, dict[str, Any]]] = {
    gpu: (sheet, dict(zip(_SHEET_NAMES, values, strict=True))) for gpu, (sheet, *values) in _SHEETS.items()
}


def _constant(default: Any, unit: str, meaning: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "source": source})


SHEET = "data sheet"
ASSUMED = "assumption"
SLICED = "training/log_probs.py"
STUDY = "GRPO in the Countdown study, benchmarks/results/plan.md"


@dataclass(frozen=True)
class Constants:
    """What a plan is computed from, in addition to the flags and a model's shape.

    `sources` names the source of each value that replaced a field's default.
    """

    peak_flops: float = _constant(989e12, "FLOP/s", "speed of a GPU in dense bf16", SHEET)
    memory_bandwidth: float = _constant(3.35e12, "bytes/s", "speed of a GPU's memory", SHEET)
    gpu_bytes: float = _constant(80 * GIB, "bytes", "memory of a GPU", SHEET)
    link_bandwidth: float = _constant(450e9, "bytes/s", "between GPUs of one machine, in one direction", SHEET)
    network_bandwidth: float = _constant(400e9, "bytes/s", "between machines, all 8 ports together", SHEET)
    gpus_per_machine: int = _constant(8, "GPUs", "number in a machine", ASSUMED)
    train_utilisation: float = _constant(0.4, "of peak", "attained in forward and backward passes", ASSUMED)
    forward_utilisation: float = _constant(0.4, "of peak", "attained in forward passes without training", ASSUMED)
    prefill_utilisation: float = _constant(0.5, "of peak", "attained by the engines on prompts", ASSUMED)
    decode_utilisation: float = _constant(0.3, "of peak", "attained in decoding if compute limits it", ASSUMED)
    memory_utilisation: float = _constant(0.6, "of bandwidth", "attained in decoding if memory limits it", ASSUMED)
    network_utilisation: float = _constant(0.7, "of bandwidth", "attained by gathers and weight syncs", ASSUMED)
    engine_sequences: int = _constant(1024, "sequences", "most that an engine decodes at once", "vLLM's default")
    engine_reserve_bytes: float = _constant(
        3 * GIB, "bytes", "memory of an engine without weights and KV cache", ASSUMED
    )
    reserve_bytes: float = _constant(4 * GIB, "bytes", "memory of a GPU for CUDA, NCCL and fragments", ASSUMED)
    activation_factor: float = _constant(
        34, "bytes per token, layer and hidden unit", "kept for the backward pass", "arXiv 2205.05198, Eq. 1, flash"
    )
    cut_logit_bytes: float = _constant(10, "bytes per token and vocabulary entry", "logits of a cut head", "OpenRLHF")
    logit_block: float = _constant(2**27, "logits", "most that are held at a time, in bf16", SLICED)
    logit_tile: float = _constant(2**26, "logits", "of these, most that are in fp32 at a time, in 2 arrays", SLICED)
    stored_token_bytes: float = _constant(
        7.5, "bytes", "size of a token in the replay buffer", "measured, benchmarks/results/adaptation.md"
    )
    response_share: float = _constant(0.5, "of rollout.max_new_tokens", "mean length of a response", ASSUMED)
    prompt_share: float = _constant(0.1, "of data.max_len less responses", "mean length of a prompt", ASSUMED)
    signal_share: float = _constant(0.377, "of fresh groups", "rewards are not all equal", STUDY)
    gaussian_share: float = _constant(0.455, "of groups with signal", "the gaussian filter keeps them", STUDY)
    replayable_share: float = _constant(0.035, "of recent fresh groups", "within c2 and c3, then and today", STUDY)
    hard_share: float = _constant(0.469, "of fresh groups", "mean reward is at most c1", STUDY)
    leaving_share: float = _constant(0.171, "of re-evaluated prompts", "above c1, so they leave the buffer", STUDY)
    improved_share: float = _constant(0.157, "of re-evaluated prompts", "mean is above c1 and below 1: X2", STUDY)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU without the reserve."""
        return self.gpu_bytes - self.reserve_bytes

    def rows(self) -> list[dict[str, Any]]:
        """Name, value, unit, meaning and source of each constant."""
        return [
            {"name": item.name, "value": getattr(self, item.name), **item.metadata}
            | ({"source": self.sources[item.name]} if item.name in self.sources else {})
            for item in fields(self)
            if item.metadata
        ]

    def replaced(self, source: str, values: Mapping[str, Any]) -> Self:
        """These constants with some values replaced by those of another source."""
        return replace(self, **values, sources={**self.sources, **dict.fromkeys(values, source)})


def constants_of(gpu: str) -> Constants:
    """The constants for a kind of GPU.

    Raises:
        ConfigError: DATA_SHEETS has no such kind.
    """
    if gpu not in DATA_SHEETS:
        raise ConfigError(f"gpu is {gpu!r}; it must be one of {', '.join(DATA_SHEETS)}")
    sheet, values = DATA_SHEETS[gpu]
    found = Constants().replaced(sheet, values)
    return replace(found, sources={**found.sources, "engine_sequences": f"vLLM's default on {gpu}"})

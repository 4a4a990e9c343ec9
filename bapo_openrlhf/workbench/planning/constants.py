"""Every number that a plan assumes, in one place, with its unit and its source."""

from dataclasses import dataclass, field, fields
from typing import Any

from bapo_openrlhf.errors import ConfigError

GIB = 2**30
# Bytes of a GPU, from the makers' data sheets. The 4090 stands for cards of 24 GB.
DATA_SHEETS = {
    "A100": ("NVIDIA A100 80GB data sheet", 80 * GIB),
    "H100": ("NVIDIA H100 data sheet", 80 * GIB),
    "H200": ("NVIDIA H200 data sheet", 141e9),
    "4090": ("NVIDIA Ada GPU Architecture white paper", 24 * GIB),
}


def _constant(default: Any, unit: str, meaning: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "source": source})


ASSUMED = "assumption"
RAY = "default of Ray 2.55.0"
SLICED = "training/worker/log_probs.py"
STUDY = "GRPO in the first study, docs/plan.md"


@dataclass(frozen=True)
class Constants:
    """What a plan is computed from, in addition to the flags and a model's shape."""

    gpu: str = "H100"  # kind of GPU, one of DATA_SHEETS
    gpu_bytes: float = _constant(80 * GIB, "bytes", "memory of a GPU", "data sheet")
    gpus_per_machine: int = _constant(8, "GPUs", "number in a machine", ASSUMED)
    engine_reserve_bytes: float = _constant(
        3 * GIB, "bytes", "memory of an engine without weights and KV cache", ASSUMED
    )
    reserve_bytes: float = _constant(
        6 * GIB, "bytes", "memory of a GPU for CUDA, NCCL, buffers", "4.6 to 5.3 GiB in three runs, docs/plan.md"
    )
    object_store_share: float = _constant(0.3, "of a machine's memory", "Ray's store of objects", RAY)
    object_store_most_bytes: float = _constant(200e9, "bytes", "most that Ray's store of objects takes", RAY)
    cut_logit_bytes: float = _constant(10, "bytes per token and vocabulary entry", "logits of a cut head", "OpenRLHF")
    logit_block: float = _constant(2**27, "logits", "most that are held at a time, in bf16", SLICED)
    logit_tile: float = _constant(2**26, "logits", "of these, most that are in fp32 at a time, in 2 arrays", SLICED)
    response_share: float = _constant(0.5, "of rollout.max_new_tokens", "mean length of a response", ASSUMED)
    prompt_share: float = _constant(0.1, "of data.max_len less responses", "mean length of a prompt", ASSUMED)
    signal_share: float = _constant(0.377, "of fresh groups", "rewards are not all equal", STUDY)
    gaussian_share: float = _constant(0.455, "of groups with signal", "the gaussian filter keeps them", STUDY)
    replayable_share: float = _constant(0.035, "of recent fresh groups", "within c2 and c3, then and today", STUDY)
    hard_share: float = _constant(0.469, "of fresh groups", "mean reward is at most c1", STUDY)
    leaving_share: float = _constant(0.171, "of re-evaluated prompts", "above c1, so they leave the buffer", STUDY)
    improved_share: float = _constant(0.157, "of re-evaluated prompts", "mean is above c1 and below 1: X2", STUDY)

    def rows(self) -> list[dict[str, Any]]:
        """Name, value, unit, meaning and source of each constant."""
        return [
            {"name": item.name, "value": getattr(self, item.name), **item.metadata}
            | ({"source": DATA_SHEETS[self.gpu][0]} if item.name == "gpu_bytes" else {})
            for item in fields(self)
            if item.metadata
        ]


def constants_of(gpu: str) -> Constants:
    """The constants for one of DATA_SHEETS; a ConfigError for another word."""
    if gpu not in DATA_SHEETS:
        raise ConfigError(f"gpu is {gpu!r}; it must be one of {', '.join(DATA_SHEETS)}")
    return Constants(gpu, DATA_SHEETS[gpu][1])

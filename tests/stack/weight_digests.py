"""The digests of weights, tensor by tensor.

Nothing of OpenRLHF is imported here, because a function that an engine's process is to run is imported there, and
OpenRLHF's models cannot be imported there without flash-attn.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch


def digest(weight: torch.Tensor) -> str:
    data = weight.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: digest(weight) for name, weight in weights}


def of_vllm_worker(worker: Any) -> dict[str, str]:
    return digests(worker.model_runner.model.named_parameters())

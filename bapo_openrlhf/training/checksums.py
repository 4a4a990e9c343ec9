"""Digests of weights, to compare the actor's weights with those of a rollout engine, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

# vLLM stacks these projections in one tensor, in the output dimension.
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def digest(weight: torch.Tensor) -> str:
    """The digest of a tensor's bytes."""
    data = weight.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The digest of each named tensor."""
    return {name: digest(weight) for name, weight in weights}


def stacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face model under vLLM's names, with the projections stacked as in vLLM."""
    result: dict[str, torch.Tensor] = {}
    parts = {part: (whole, members) for whole, members in STACKED.items() for part in members}
    for name, weight in weights.items():
        key = next((part for part in parts if f".{part}." in name), None)
        if key is None:
            result[name] = weight
            continue
        whole, members = parts[key]
        if key == members[0]:
            result[name.replace(key, whole)] = torch.cat([weights[name.replace(key, part)] for part in members])
    return result

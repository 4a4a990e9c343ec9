"""Inputs and answers of a model's processes: numpy arrays in place of tensors, demonstrations, parcels of weights.

Ray copies an array once and a tensor several times. A sample whose behaviour log-probs are nan is a demonstration.
"""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch

WIDE = ("sequences", "attention_mask", "action_mask")  # int32 or bool in the trainer, and int64 in the workers
FIRST_RATIO = "first_ratio"  # what the actor returns, and from which the trainer knows that it has looked

Piece = tuple[str, tuple[int, ...]]  # name and shape of a tensor in a parcel of weights


class Packed(dict):
    """Inputs of a rank's calls, with numpy arrays in place of tensors."""


def mapped(value: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """The value with `change(array or tensor, name of the field or key that has it)` in place of each of these."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return change(value, name)
    if is_dataclass(value):
        return replace(value, **mapped(vars(value), change))
    if isinstance(value, dict):
        return {key: mapped(item, change, key) for key, item in value.items()}
    return [mapped(item, change, name) for item in value] if isinstance(value, list) else value


def packed(value: Any) -> Any:
    """The value with arrays in place of its tensors, in the same memory. bfloat16 stays, because numpy has none."""
    return mapped(value, lambda tensor, _: tensor if tensor.dtype == torch.bfloat16 else tensor.numpy())


def unpacked(value: Any) -> Any:
    """The inverse of `packed`, see WIDE. These tensors are copies, because the arrays are in Ray's memory."""

    def tensor(array: Any, name: str) -> Any:
        return torch.from_numpy(array.astype(np.int64 if name in WIDE else array.dtype))

    return mapped(value, lambda array, name: tensor(array, name) if isinstance(array, np.ndarray) else array)


def demonstration_tokens(experience: Any) -> float:
    """Number of tokens of demonstrations in an experience, on the CPU."""
    log_probs = experience.rollout_log_probs
    return 0.0 if log_probs is None else float(log_probs.isnan().sum())


def is_demonstration(sample: Any) -> bool:
    """Whether a sample is a demonstration."""
    return demonstration_tokens(sample) > 0

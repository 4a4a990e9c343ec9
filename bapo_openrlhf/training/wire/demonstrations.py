"""How a sample says that it is a demonstration: its behaviour log-probs are nan."""

from typing import Any


def shown_tokens(experience: Any) -> float:
    """Number of tokens of demonstrations in an experience, on the CPU."""
    log_probs = experience.rollout_log_probs
    return 0.0 if log_probs is None else float(log_probs.isnan().sum())


def is_demonstration(sample: Any) -> bool:
    """Whether a sample is a demonstration."""
    return shown_tokens(sample) > 0

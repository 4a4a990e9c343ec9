"""Dropout, and other noise that a model has only while it is trained.

The old log-probs are computed without noise, and the loss computes them again with it. So with an attention dropout of
0.3, one token in five is outside of the clip range before anything was learned.
"""

from collections.abc import Mapping
from typing import Any

NOISE = ("drop", "jitter")  # parts of the names of such settings: attn_pdrop, hidden_dropout, layerdrop, jitter_noise
OF_LORA = "lora_dropout"  # it has a flag of its own, `--ds.lora.dropout`


def noise_of(settings: Mapping[str, Any]) -> dict[str, float]:
    """The settings that are probabilities or sizes of noise, and are not 0."""
    return {
        name: value
        for name, value in settings.items()
        if any(part in name for part in NOISE) and type(value) in (int, float) and value
    }


def without_noise(model: Any) -> None:
    """Set all noise of a model to 0: in its configurations, and in its modules, which may have read them already."""
    for name, module in model.named_modules():
        if OF_LORA in name:
            continue
        config = getattr(module, "config", None)
        for owner in (module, config) if hasattr(config, "to_dict") else (module,):
            for setting in noise_of(vars(owner)):
                setattr(owner, setting, 0.0)
        if noise_of({type(module).__name__.lower(): getattr(module, "p", 0)}):  # torch's own, such as Dropout
            module.p = 0.0

"""What is mended in a model that was loaded: noise, rotary frequencies, what divides rewards, how it is saved."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

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
    """Set dropout and all other noise to 0: in a model's configurations, and in its modules, which may have read them.

    The old log-probs are computed without noise, and the loss computes them again with it. So with an attention
    dropout of 0.3, one token in five is outside of the clip range before anything was learned.
    """
    for name, module in model.named_modules():
        if OF_LORA in name:
            continue
        config = getattr(module, "config", None)
        for owner in (module, config) if hasattr(config, "to_dict") else (module,):
            for setting in noise_of(vars(owner)):
                setattr(owner, setting, 0.0)
        if noise_of({type(module).__name__.lower(): getattr(module, "p", 0)}):  # torch's own, such as Dropout
            module.p = 0.0


def restore_frequencies(model: torch.nn.Module) -> None:
    """Compute the frequencies again that ZeRO stage 3 rounded. If that is impossible, a warning names the module.

    transformers computes the frequencies in float32. Under ZeRO stage 3, DeepSpeed gives the model's dtype to each
    tensor that is made while the model is built. So the frequencies of the rope type `default`, which most models have,
    become bfloat16. An angle, position times frequency, is then wrong by up to 2^-8 of itself. The lower stages keep
    float32, as vLLM does.

    It must come last: after the engine of DeepSpeed was made, and after a checkpoint was loaded.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return
    for name, module, owner in _with_owners(model):
        buffers = {
            key: buffer
            for key, buffer in module.named_buffers(recurse=False)
            if key.endswith("inv_freq") and buffer.dtype != torch.float32
        }
        if buffers and not _computed_again(module, owner, buffers):
            logger.warning(
                "%s (%s): ZeRO stage 3 rounded the rotary frequencies to %s, and the model's code cannot compute them "
                "again, so the error of log-probs grows with the position; ds.zero_stage below 3 does not round them",
                name,
                type(module).__name__,
                str(next(iter(buffers.values())).dtype).removeprefix("torch."),
            )


def _with_owners(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, PreTrainedModel | None]]:
    """Each module with its name, and with the innermost model of transformers that it is in or that it is."""
    owners: dict[str, PreTrainedModel | None] = {}
    for name, module in model.named_modules():
        parent = owners.get(name.rpartition(".")[0])
        owners[name] = module if isinstance(module, PreTrainedModel) else parent
        yield name, module, owners[name]


def _computed_again(module: torch.nn.Module, owner: PreTrainedModel | None, buffers: dict[str, torch.Tensor]) -> bool:
    """Put float32 in the place of the rounded buffers; if that is impossible, change nothing and return False."""
    if owner is None or next(module.parameters(), None) is not None:
        return False
    for key, buffer in buffers.items():
        setattr(module, key, torch.full_like(buffer, torch.nan, dtype=torch.float32))
    with torch.no_grad():
        owner._init_weights(module)  # as in the lower stages; it would also fill weights of the module's own
    if not any(getattr(module, key).isnan().any() for key in buffers):
        return True
    for key, buffer in buffers.items():
        setattr(module, key, buffer)
    return False


def restore_normalisation(model: torch.nn.Module) -> None:
    """Give a model the mean and the standard deviation in its configuration; 0 and 1 if it has none.

    With `--reward.normalize_enable`, reward model and critic divide by them. OpenRLHF's models keep them in buffers
    that no file of weights has, and fill these while the model is built. But transformers 5 builds a model without
    data, so the buffers then have what happens to be in their memory.
    """
    for module in model.modules():
        if "normalize_reward" in vars(module):  # an engine of DeepSpeed would answer for the model inside
            module.mean.fill_(getattr(module.config, "mean", 0.0))
            module.std.fill_(getattr(module.config, "std", 1.0))


def make_savable(model: torch.nn.Module) -> None:
    """Say that a model samples if its generation_config.json is only valid then. How a run generates stays as it is.

    transformers would refuse to save a model that has a temperature there and no `do_sample`.

    Raises:
        ValueError: transformers could not save it with `do_sample` either.
    """
    for module in model.modules():
        config = getattr(module, "generation_config", None)
        if isinstance(module, PreTrainedModel) and config is not None:
            try:
                config.validate(strict=True)
            except ValueError as error:
                config.do_sample = True
                config.validate(strict=True)
                logger.warning("the model is saved with do_sample: true in generation_config.json: %s", error)

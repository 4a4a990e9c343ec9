"""Lets a model be saved whose generation_config.json transformers reads, but does not write."""

import logging

import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


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

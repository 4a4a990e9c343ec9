"""Mean and standard deviation by which reward model and critic divide with `--reward.normalize_enable`.

OpenRLHF's models keep them in buffers that no file of weights has, and fill these while the model is built. But
transformers 5 builds a model without data, so the buffers then have what happens to be in their memory.
"""

import torch


def restore_normalisation(model: torch.nn.Module) -> None:
    """Give both buffers the numbers in the configuration of the model; 0 and 1 if it has none."""
    for module in model.modules():
        if "normalize_reward" in vars(module):  # an engine of DeepSpeed would answer for the model inside
            module.mean.fill_(getattr(module.config, "mean", 0.0))
            module.std.fill_(getattr(module.config, "std", 1.0))

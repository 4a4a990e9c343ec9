"""`python -m bapo_openrlhf.cli.serve_rm`: OpenRLHF's reward server, with the same flags.

The drop-in for `python -m openrlhf.cli.serve_rm`, which needs flash-attn even if no sample is packed, and with
`--reward.normalize_enable` divides by what happens to be in memory (`training/learn/normalisation.py`).
"""

import runpy
from typing import Any

from bapo_openrlhf.cpu import flash_attention
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()
    if not cpu.active() and flash_attention.missing():
        flash_attention.set_up_worker()

    from openrlhf import models

    from bapo_openrlhf.training.contract import rebound
    from bapo_openrlhf.training.learn.normalisation import restore_normalisation

    load = models.get_llm_for_sequence_regression

    def loaded(*args: Any, **kwargs: Any) -> Any:
        """The reward model, with its own mean and standard deviation."""
        model = load(*args, **kwargs)
        restore_normalisation(model)
        return model

    with rebound(models, get_llm_for_sequence_regression=loaded):
        runpy.run_module("openrlhf.cli.serve_rm", run_name="__main__", alter_sys=True)

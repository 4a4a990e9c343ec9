"""`python -m bapo_openrlhf.cli.serve_rm`: OpenRLHF's reward server, with the same flags.

The drop-in for `python -m openrlhf.cli.serve_rm`, which needs flash-attn even if no sample is packed, and with
`--reward.normalize_enable` divides by what happens to be in memory (`training/learn/normalisation.py`).
"""

import importlib
from typing import Any

from bapo_openrlhf.cpu import flash_attention
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()
    if not cpu.active() and flash_attention.missing():
        flash_attention.set_up_worker()

    from bapo_openrlhf.launch import openrlhf_cli
    from bapo_openrlhf.training.contract import require_name
    from bapo_openrlhf.training.learn.normalisation import restore_normalisation

    script = importlib.import_module(f"openrlhf.cli.{openrlhf_cli.SERVER}")
    NAME = "RewardModelProxy"

    class RestoringProxy(require_name(script, NAME)):  # type: ignore[misc]
        """What OpenRLHF's server asks for scores, with the model's own mean and standard deviation."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            restore_normalisation(self.reward_model)

    openrlhf_cli.run_block(openrlhf_cli.SERVER, vars(script) | {NAME: RestoringProxy})

"""`python -m bapo_openrlhf.cli.serve_rm`: OpenRLHF's reward server, with the same flags.

The drop-in for `python -m openrlhf.cli.serve_rm`, which needs flash-attn even if no sample is packed, and with
`--reward.normalize_enable` divides by what happens to be in memory (`training/worker/mended_models.py`).
"""

import importlib
from typing import Any

from bapo_openrlhf import machine

if __name__ == "__main__":
    machine.set_up()

    from bapo_openrlhf import host
    from bapo_openrlhf.host import require_name
    from bapo_openrlhf.training.worker.mended_models import restore_normalisation

    script = importlib.import_module(f"openrlhf.cli.{host.SERVER}")
    NAME = "RewardModelProxy"

    class RestoringProxy(require_name(script, NAME)):  # type: ignore[misc]
        """What OpenRLHF's server asks for scores, with the model's own mean and standard deviation."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            restore_normalisation(self.reward_model)

    host.run_block(host.SERVER, vars(script) | {NAME: RestoringProxy})

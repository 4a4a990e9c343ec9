"""`python -m bapo_openrlhf.cli.serve_rm`: OpenRLHF's reward server, with the same flags.

The drop-in for `python -m openrlhf.cli.serve_rm`, which needs flash-attn even if no sample is packed.
"""

import runpy

from bapo_openrlhf.cpu import flash_attention
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()
    if not cpu.active() and flash_attention.missing():
        flash_attention.set_up_worker()
    runpy.run_module("openrlhf.cli.serve_rm", run_name="__main__", alter_sys=True)

"""`python -m bapo_openrlhf.cli.train_ppo_ray`: takes an OpenRLHF command line as it is.

The drop-in for `python -m openrlhf.cli.train_ppo_ray`; add `--algorithm` or `--adapt.*` to adapt batches.
"""

import sys

from bapo_openrlhf.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["train", *sys.argv[1:]], prog="python -m bapo_openrlhf.cli.train_ppo_ray"))

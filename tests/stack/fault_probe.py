"""A run of `bapo-openrlhf train` in which FAULT happens (see fault_probe_classes.py), started as a script by the tests.

Its folder is on PYTHONPATH, so that Ray's workers find the classes.
"""

import os
import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    os.environ["FAULT_DRIVER"] = str(os.getpid())
    cpu.prepare_environment()
    cpu.install()

    import fault_probe_classes

    from bapo_openrlhf.training.trainer import trainer

    trainer.AdaptedPPOTrainerActor = fault_probe_classes.FaultyTrainerActor
    sys.exit(run(["train", *sys.argv[1:]]))

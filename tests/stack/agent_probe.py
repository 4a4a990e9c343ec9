"""A run of `bapo-openrlhf train` with the trainer of probe_classes.py and the actor of ragged_probe_classes.py.

The stack tests start it as a script. Its folder is on PYTHONPATH, so that Ray's workers find the
classes.
"""

import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()

    import agent_probe_classes

    from bapo_openrlhf.training.trainer import trainer
    from bapo_openrlhf.training.worker import workers

    trainer.AdaptedPPOTrainerActor = agent_probe_classes.ProbeTrainerActor
    workers.AdaptedPolicyActor = agent_probe_classes.WatchedPolicyActor
    sys.exit(run(["train", *sys.argv[1:]]))

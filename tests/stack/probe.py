"""A run of `bapo-openrlhf train` with the trainer of probe_classes.py, started as a script by the stack tests.

Its folder is on PYTHONPATH, so that Ray's workers find the classes.
"""

import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()

    import probe_classes
    import stage_classes

    from bapo_openrlhf.training.engine import engines
    from bapo_openrlhf.training.trainer import trainer
    from bapo_openrlhf.training.worker import workers

    trainer.AdaptedPPOTrainerActor = probe_classes.ProbeTrainerActor
    engines.RolloutActor = stage_classes.NotingEngineActor
    workers.AdaptedPolicyActor = stage_classes.NotingPolicyActor
    sys.exit(run(["train", *sys.argv[1:]]))

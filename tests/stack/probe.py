"""A run of `bapo-openrlhf train` with the trainer of probe_classes.py, started as a script by the stack tests.

Its folder and benchmarks/ are on PYTHONPATH, so that Ray's workers find the classes.
"""

import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()

    import probe_classes
    import stage_classes

    from bapo_openrlhf.training.generate import engines
    from bapo_openrlhf.training.learn import workers
    from bapo_openrlhf.training.run import trainer

    trainer.AdaptedPPOTrainerActor = probe_classes.ProbeTrainerActor
    engines.RolloutActor = stage_classes.NotingEngineActor
    workers.AdaptedPolicyActor = stage_classes.NotingPolicyActor
    sys.exit(run(["train", *sys.argv[1:]]))

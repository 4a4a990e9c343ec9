"""A run of `bapo-openrlhf train` with the trainer of vision_probe_classes.py, started as a script by the stack tests.

Its folder is on PYTHONPATH, so that Ray's workers find the classes.
"""

import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()

    import vision_probe_classes
    import weight_checksums

    from bapo_openrlhf.training.engine import engines
    from bapo_openrlhf.training.trainer import trainer
    from bapo_openrlhf.training.worker import workers

    trainer.AdaptedPPOTrainerActor = vision_probe_classes.VisionProbeTrainerActor
    engines.RolloutActor = weight_checksums.ChecksumEngineActor
    workers.AdaptedPolicyActor = weight_checksums.ChecksumPolicyActor
    sys.exit(run(["train", *sys.argv[1:]]))

"""A run whose engines hold other weights than the actor (see other_weights_classes.py), started as a script.

Its folder is on PYTHONPATH, so that Ray's workers find the class.
"""

import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()

    import other_weights_classes

    from bapo_openrlhf.training.worker import workers

    workers.AdaptedPolicyActor = other_weights_classes.OtherPolicyActor
    sys.exit(run(["train", *sys.argv[1:]]))

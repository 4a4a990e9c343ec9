"""A run of `bapo-openrlhf train` with the workers of ragged_probe_classes.py, started as a script by the stack tests.

Its folder is on PYTHONPATH, so that Ray's workers find the classes.
"""

import os
import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu


def with_dynamic_batching(prepare, tokens):
    """`launch.set_openrlhf_flags`, after which micro-batches have up to `tokens` tokens.

    The flag `--train.dynamic_batch_enable` would switch packing on, which needs a GPU; nothing else does.
    """

    def prepared(args):
        prepare(args)
        args.train.dynamic_batch_enable = True
        args.train.max_tokens_per_gpu = args.rollout.max_tokens_per_gpu = tokens

    return prepared


if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()

    import ragged_probe_classes

    from bapo_openrlhf.launch import start as launch
    from bapo_openrlhf.training.worker import workers

    workers.AdaptedPolicyActor = ragged_probe_classes.WatchedPolicyActor
    workers.AdaptedCriticActor = ragged_probe_classes.WatchedCriticActor
    if int(os.environ["RAGGED_TOKENS"]):
        launch.set_openrlhf_flags = with_dynamic_batching(launch.set_openrlhf_flags, int(os.environ["RAGGED_TOKENS"]))
    sys.exit(run(["train", *sys.argv[1:]]))

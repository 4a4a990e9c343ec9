"""A run of `bapo-openrlhf train` with classes of the tests in the place of its own: probe.py NAME FLAGS.

NAME is one of PROBES. The folder is on PYTHONPATH, so that Ray's workers find the classes.
"""

import importlib
import os
import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cpu import stack as cpu

TRAINER, ENGINE = "trainer.trainer:AdaptedPPOTrainerActor", "engine.engines:RolloutActor"
ACTOR, CRITIC = "worker.workers:AdaptedPolicyActor", "worker.workers:AdaptedCriticActor"
CHECKSUMS = {ENGINE: "weight_checksums:ChecksumEngineActor", ACTOR: "weight_checksums:ChecksumPolicyActor"}
WATCHED = {ACTOR: "ragged_probe_classes:WatchedPolicyActor"}
# For each class of bapo_openrlhf.training that has another one in its place, that one.
PROBES = {
    "watched": {TRAINER: "probe_classes:ProbeTrainerActor", **CHECKSUMS},
    "agents": {TRAINER: "probe_classes:AgentProbeTrainerActor", **WATCHED},
    "faults": {TRAINER: "fault_probe_classes:FaultyTrainerActor"},
    "other_weights": {ACTOR: "other_weights_classes:OtherPolicyActor"},
    "ragged": {CRITIC: "ragged_probe_classes:WatchedCriticActor", **WATCHED},
    "vision": {TRAINER: "probe_classes:VisionProbeTrainerActor", **CHECKSUMS},
}


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
    os.environ["FAULT_DRIVER"] = str(os.getpid())
    cpu.prepare_environment()
    cpu.install()

    for place, substitute in PROBES[sys.argv[1]].items():
        module, name = place.split(":")
        source, substitute_name = substitute.split(":")
        value = getattr(importlib.import_module(source), substitute_name)
        setattr(importlib.import_module(f"bapo_openrlhf.training.{module}"), name, value)
    if tokens := int(os.environ.get("RAGGED_TOKENS", 0)):
        from bapo_openrlhf.launch import start

        start.set_openrlhf_flags = with_dynamic_batching(start.set_openrlhf_flags, tokens)
    sys.exit(run(["train", *sys.argv[2:]]))

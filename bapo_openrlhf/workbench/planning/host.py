"""Bytes in the memory of a machine, and on the disk."""

import math
from dataclasses import dataclass

from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.memory import OPTIMIZER, tensor_parallel
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.workload import Algorithm, Workload


@dataclass(frozen=True)
class Host:
    """What a run keeps outside its GPUs, in bytes."""

    engines: float  # the engines' weights while they sleep, in all machines together
    delayed: float  # delayed rollout weights, if something is generated with today's between two syncs
    optimizers: float  # the optimizers' states while the models sleep, or always with `--ds.adam_offload`
    machines: int  # number of machines, which have equal parts of these three
    object_store: float  # that Ray may take on each machine for what its processes hand to one another
    checkpoint: float  # on the disk, one checkpoint of all trained models

    @property
    def machine(self) -> float:
        """Bytes of memory that each machine needs, without those of the processes' own code and data."""
        return (self.engines + self.delayed + self.optimizers) / self.machines + self.object_store


def host_memory(shape: ModelShape, workload: Workload, constants: Constants, algorithm: Algorithm, total: int) -> Host:
    """What a run on `total` GPUs keeps outside them. A critic has the actor's shape. Engines sleep on level 1."""
    args, models = workload.args, len(algorithm.trained)
    size = tensor_parallel(shape, workload, constants) or constants.gpus_per_machine
    weights = shape.weight_bytes * max(workload.gpus_of("engines", algorithm, total) // size, 1)
    todays = [args.adapt.reevaluate_every, args.run.gradient_probe, args.eval.steps if args.eval.dataset else 0]
    between = algorithm.adapted and any(every > 0 and every % args.adapt.rollout_delay for every in todays)
    states = OPTIMIZER * (shape.adapter_parameters(args.ds.lora.rank, args.ds.lora.target_modules) or shape.parameters)
    engines = weights if args.vllm.enable_sleep else 0.0
    delayed = weights if between else 0.0
    on_host = args.ds.adam_offload or (args.train.colocate_all and args.ds.enable_sleep)
    optimizers = models * states if on_host else 0.0
    machines, share = math.ceil(total / constants.gpus_per_machine), constants.object_store_share
    # Ray's store is a share of the machine's memory, so it grows with what the machine must hold.
    store = min((engines + delayed + optimizers) / machines * share / (1 - share), constants.object_store_most_bytes)
    return Host(engines, delayed, optimizers, machines, store, models * (shape.weight_bytes + states))

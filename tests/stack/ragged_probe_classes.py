"""Actor and critic workers under watch: each rank writes down what its trainer is given and does (see probe.py).

One file an update: PROBE_FOLDER/MODEL-RANK-UPDATE.pt.
"""

import os
from pathlib import Path

import ray
import torch
from deepspeed.utils import safe_get_full_fp32_param
from waits import Waits

from bapo_openrlhf.training.worker import workers
from bapo_openrlhf.training.worker.updates import READ


def parameters(engine):
    """DeepSpeed's fp32 parameters by name, whole; all ranks must call it."""
    return {name: safe_get_full_fp32_param(value).clone() for name, value in engine.module.named_parameters()}


class Watched:
    """Mixed into a trainer: notes each micro-batch, and the parameters whenever the optimizer has stepped."""

    model = ""
    updates = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        loss = getattr(self, f"{self.model}_loss_fn")
        loss.register_forward_pre_hook(lambda _, inputs: self.note.update(output=inputs[0].detach().clone()))

    def ppo_train(self, *args):
        engine, first = self.engine, self.strategy.is_rank_0()
        given = [(item.sequences.clone(), item.advantages.clone()) for item in self.replay_buffer.items]
        before = parameters(engine)
        self.micro_batches = []
        status = super().ppo_train(*args)
        notes = {
            "given": given,
            "status": dict(status),
            "before": before if first else None,
            "micro_batches": self.micro_batches,
            "micro_steps": engine.micro_steps,
            "optimizer_steps": engine.global_steps,
            "sliced": self.model == "critic" or self.actor.sliced,
        }
        name = f"{self.model}-{self.strategy.get_rank()}-{self.updates}.pt"
        torch.save(notes, Path(os.environ["PROBE_FOLDER"]) / name)
        self.updates += 1
        return status

    def train_micro_batch(self, experience, *args):
        engine = self.engine
        fields = {name: getattr(experience, name) for name in READ}
        self.note = {name: value.clone() for name, value in fields.items() if value is not None}
        self.note["rate"], steps = engine.optimizer.param_groups[0]["lr"], engine.global_steps
        with Waits() as waits:
            super().train_micro_batch(experience, *args)
        self.note["waits"] = dict(waits.counts)
        self.note["stepped"] = engine.global_steps > steps
        if self.note["stepped"]:
            after = parameters(engine)
            if self.strategy.is_rank_0():
                self.note |= {"after": after, "norm": float(engine.get_global_grad_norm())}
        self.micro_batches.append(self.note)


class WatchedActorTrainer(Watched, workers.WholeBatchActorTrainer):
    model = "actor"


class WatchedCriticTrainer(Watched, workers.WholeBatchCriticTrainer):
    model = "critic"


class WatchedPolicyWorker(workers.PolicyWorker):
    trainer_class = WatchedActorTrainer


class WatchedCriticWorker(workers.CriticWorker):
    trainer_class = WatchedCriticTrainer


WatchedPolicyActor = ray.remote(num_gpus=1)(WatchedPolicyWorker)
WatchedCriticActor = ray.remote(num_gpus=1)(WatchedCriticWorker)

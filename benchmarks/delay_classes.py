"""The classes that delay.py measures, in a module that Ray's workers can import."""

import json
import os
import time
from pathlib import Path

import ray
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from bapo_openrlhf.training.trainer import trainer
from bapo_openrlhf.training.worker import workers


class SendingWorker(workers.PolicyWorker):
    """The alternative: the actor keeps the weights and sends them to the engines through its own parameters."""

    def shards(self):
        parameters = self.actor.model.module.parameters()
        return [getattr(parameter, "ds_tensor", parameter).data for parameter in parameters]

    def keep(self):
        self.kept = [shard.to("cpu", copy=True) for shard in self.shards()]
        return sum(shard.nbytes for shard in self.kept)

    def send(self):
        shards = self.shards()
        current = [shard.to("cpu", copy=True) for shard in shards]
        for shard, weights in zip(shards, self.kept, strict=True):
            shard.copy_(weights)
        self.broadcast_to_vllm()
        for shard, weights in zip(shards, current, strict=True):
            shard.copy_(weights)


class MeasuringTrainer(trainer.AdaptedPPOTrainer):
    """Keeps and restores in both ways instead of training, and checks that the engines hold the right weights."""

    def fit(self, global_step=0):
        checksums = self.checksums()
        actor = self.actor_model_group

        def on_actor(method):
            return ray.get(actor.async_run_method(method_name=method))

        def on_engines(method):
            return batch_vllm_engine_call(self.vllm_engines, method)

        kept = {"engines": sum(on_engines("keep_weights")), "actor": sum(on_actor("keep"))}
        seconds = {name: [] for name in ("sync", "engines_keep", "engines_restore", "actor_keep", "actor_send")}
        for _ in range(int(os.environ["REPEATS"])):
            for name, call in (
                ("sync", lambda: super(trainer.AdaptedPPOTrainer, self).broadcast_to_vllm()),
                ("engines_keep", lambda: on_engines("keep_weights")),
                ("engines_restore", lambda: batch_vllm_engine_call(self.vllm_engines, "restore_weights", 0)),
                ("actor_keep", lambda: on_actor("keep")),
                ("actor_send", lambda: on_actor("send")),
            ):
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
                if self.checksums() != checksums:
                    raise RuntimeError(f"after {name} the engines hold other weights")
        Path(os.environ["RESULT"]).write_text(json.dumps({"bytes": kept, "seconds": seconds}))

    def checksums(self):
        return batch_vllm_engine_call(self.vllm_engines, "weight_checksums")


class SerialTrainer(trainer.AdaptedPPOTrainer):
    """The alternative: hard prompts are generated after the fresh ones, also if both use the same weights."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        generator = self.samples_generator
        along = generator._hard_prompts

        def none_along(draft):
            draft.rollout.hard_prompts_left = [*draft.rollout.hard_prompts_left, *along(draft)]
            return []

        generator._hard_prompts = none_along


SerialTrainerActor = ray.remote(SerialTrainer)
SendingWorkerActor = ray.remote(num_gpus=1)(SendingWorker)
MeasuringTrainerActor = ray.remote(MeasuringTrainer)

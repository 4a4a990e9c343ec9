"""An actor that has read other weights than the engines, or that sends them none: OTHER is read or sent."""

import os

import ray
import torch

from bapo_openrlhf.training.worker.workers import PolicyWorker


class OtherPolicyWorker(PolicyWorker):
    def init_model_from_pretrained(self, *args, **kwargs):
        super().init_model_from_pretrained(*args, **kwargs)
        if os.environ["OTHER"] == "read":
            with torch.no_grad():
                for parameter in self.actor.parameters():
                    parameter.mul_(4)

    def broadcast_to_vllm(self):
        if os.environ["OTHER"] != "sent":
            super().broadcast_to_vllm()


OtherPolicyActor = ray.remote(num_gpus=1)(OtherPolicyWorker)

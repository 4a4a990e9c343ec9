"""The recording trainer and workers of floor.py, in a module that Ray's workers can import.

They keep references to the token ids that pass through them, and write them only when the run has ended, so that
recording takes no time of a step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray
import torch

from bapo_openrlhf.training.trainer import plain_trainer, trainer
from bapo_openrlhf.training.worker import workers

FOLDER = "FLOOR_FOLDER"  # environment variable: where the recordings go
NAMES = ("sequences", "attention_mask", "action_mask")  # tensors of a micro-batch


class Recorder:
    """A mixin for a worker, which notes (time, what, tensors) of each forward pass, training pass and weight sync."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        super().init_model_from_pretrained(*args, **kwargs)
        self.noted: list[tuple[float, str, dict[str, torch.Tensor]]] = []
        if hasattr(self, "trainer"):
            name = "train_micro_batch" if hasattr(self.trainer, "train_micro_batch") else "training_step"  # OpenRLHF's
            step = getattr(self.trainer, name)

            def noted(experience: Any, *more: Any) -> Any:
                self.note("train", **{name: getattr(experience, name) for name in NAMES})
                return step(experience, *more)

            setattr(self.trainer, name, noted)

    def note(self, what: str, **tensors: torch.Tensor) -> None:
        self.noted.append((time.time(), what, tensors))

    def forward(self, **inputs: Any) -> Any:
        self.note("forward", **{name: inputs[name] for name in NAMES})
        return super().forward(**inputs)

    def write_notes(self, name: str) -> None:
        torch.save(self.noted, Path(os.environ[FOLDER]) / name)


class SyncRecorder(Recorder):
    """The same for an actor, which sends its weights to the engines."""

    def broadcast_to_vllm(self, *args: Any, **kwargs: Any) -> Any:
        self.note("sync")
        return super().broadcast_to_vllm(*args, **kwargs)


class RecordingTrainer:
    """A mixin for a trainer, which notes the samples of each step and its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noted_steps: list[dict[str, Any]] = []

    def fit(self, *args: Any, **kwargs: Any) -> int | None:
        stopped = super().fit(*args, **kwargs)
        steps = [
            {**step, "calls": [requests_of(samples, self.args) for samples in step["calls"]]}
            for step in self.noted_steps
        ]
        torch.save(steps, Path(os.environ[FOLDER]) / "steps")
        groups = {
            "actor": self.actor_model_group,
            "critic": self.critic_model_group,
            "reference": self.reference_model_group,
        }
        for name, group in groups.items():
            if group is not None:
                ray.get(group.async_run_method(method_name="write_notes", name=name))
        return stopped

    def train_step(self, rollout_samples: list[Any], global_step: int) -> Any:
        self.noted_steps.append({"calls": [list(rollout_samples)]})
        return super().train_step(rollout_samples, global_step)

    def save_logs_and_checkpoints(self, *args: Any, **kwargs: Any) -> None:
        self.noted_steps[-1]["end"] = time.time()
        super().save_logs_and_checkpoints(*args, **kwargs)


def requests_of(samples: list[Any], args: Any) -> list[tuple[list[int], list[int]]]:
    """(token ids of the prompt, lengths of its responses) for each group of samples."""
    groups, size = [], args.rollout.n_samples_per_prompt
    for start in range(0, len(samples), size):
        first = samples[start]
        prompt = int(first.action_mask[0].nonzero()[0]) + 1  # place i of the mask belongs to token i + 1
        lengths = [int(sample.action_mask.sum()) for sample in samples[start : start + size]]
        groups.append((first.sequences[0, :prompt].tolist(), lengths))
    return groups


class AdaptedTrainer(RecordingTrainer, trainer.AdaptedPPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        generate = self.reevaluation.generate

        def noted(prompts: Any) -> Any:
            (samples, timing), calls = generate(prompts), self.noted_steps[-1]["calls"]
            calls[0].extend(self.samples_generator.rollout.hard_samples)
            if samples:
                calls.append(samples)
            return samples, timing

        self.reevaluation.generate = noted


class PlainTrainer(RecordingTrainer, plain_trainer.RecordedPPOTrainer):
    pass


class AdaptedPolicy(SyncRecorder, workers.PolicyWorker):
    pass


class AdaptedCritic(Recorder, workers.CriticWorker):
    pass


class PlainPolicy(SyncRecorder, workers.PlainPolicyWorker):
    pass


class PlainCritic(Recorder, workers.PlainCriticWorker):
    pass


class Reference(Recorder, workers.ReferenceWorker):
    pass


AdaptedTrainerActor, PlainTrainerActor = ray.remote(AdaptedTrainer), ray.remote(PlainTrainer)
AdaptedPolicyActor, AdaptedCriticActor, PlainPolicyActor, PlainCriticActor, ReferenceActor = (
    ray.remote(num_gpus=1)(kind) for kind in (AdaptedPolicy, AdaptedCritic, PlainPolicy, PlainCritic, Reference)
)


def install() -> None:
    """Let runs of this process use these classes."""
    trainer.AdaptedPPOTrainerActor, plain_trainer.RecordedPPOTrainerActor = AdaptedTrainerActor, PlainTrainerActor
    for name in ("AdaptedPolicyActor", "AdaptedCriticActor", "PlainPolicyActor", "PlainCriticActor", "ReferenceActor"):
        setattr(workers, name, globals()[name])

"""The trainer under watch: writes down what the rollout engines held and what the loss was given (see probe.py)."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import ray

from bapo_openrlhf.training import trainer
from bapo_openrlhf.training.experience import AdaptedExperienceMaker
from bapo_openrlhf.training.rollout import AdaptedSamplesGenerator

NOTED = (
    "sequences", "attention_mask", "action_mask", "action_log_probs", "rollout_log_probs", "base_action_log_probs",
)  # fmt: skip


class ProbeGenerator(AdaptedSamplesGenerator):
    """Notes the engines' weights at each generation."""

    def generate_samples(self, **kwargs):
        self.note("fresh")
        return super().generate_samples(**kwargs)

    def generate_again(self, prompts, **kwargs):
        self.note("reevaluated")
        return super().generate_again(prompts, **kwargs)


class ProbeMaker(AdaptedExperienceMaker):
    """Saves what the loss is given, with the actor's weights of that step."""

    def make_experience(self, samples_list):
        experiences = super().make_experience(samples_list)
        self.note_experiences(experiences)
        return experiences


class ProbeTrainer(trainer.AdaptedPPOTrainer):
    """The trainer with its generator and its experience maker under watch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.folder = Path(os.environ["PROBE_FOLDER"])
        self.samples_generator.__class__ = ProbeGenerator
        self.samples_generator.note = self.note
        self.experience_maker.__class__ = ProbeMaker
        self.experience_maker.note_experiences = self.note_experiences

    def note(self, kind):
        engines = ray.get([engine.weight_checksums.remote() for engine in self.vllm_engines])
        actor = ray.get(self.actor_model_group.async_run_method(method_name="weight_checksums"))[0]
        with (self.folder / "weights.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "kind": kind, "engines": engines, "actor": actor}) + "\n")

    def note_experiences(self, experiences):
        ray.get(self.actor_model_group.async_save_model())
        shutil.copytree(self.args.ckpt.output_dir, self.folder / f"actor{self.step}")
        arrays = {}
        for experience in experiences:
            for row, index in enumerate(experience.index):
                for name in NOTED:
                    arrays[f"{index}/{name}"] = getattr(experience, name)[row].numpy()
        origins = self.experience_maker.origins
        np.savez(
            self.folder / f"experience{self.step}.npz",
            source=np.array([origin.source for origin in origins]),
            on_policy=np.array([origin.on_policy for origin in origins]),
            log_ratios=self.experience_maker.log_ratios,
            **arrays,
        )


ProbeTrainerActor = ray.remote(ProbeTrainer)

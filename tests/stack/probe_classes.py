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

    def reevaluate(self, prompts, **kwargs):
        self.note("reevaluated")
        return super().reevaluate(prompts, **kwargs)


class ProbeMaker(AdaptedExperienceMaker):
    """Saves what the loss is given, with the actor's weights of that step."""

    def finish(self, passed, kept):
        made = super().finish(passed, kept)
        self.note_experience(made)
        return made


class ProbeTrainer(trainer.AdaptedPPOTrainer):
    """The trainer with its generator and its experience maker under watch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.folder = Path(os.environ["PROBE_FOLDER"])
        self.samples_generator.__class__ = ProbeGenerator
        self.samples_generator.note = self.note
        self.experience_maker.__class__ = ProbeMaker
        self.experience_maker.note_experience = self.note_experience

    def note(self, kind):
        engines = ray.get([engine.weight_checksums.remote() for engine in self.vllm_engines])
        actor = ray.get(self.actor_model_group.async_run_method(method_name="weight_checksums"))[0]
        with (self.folder / "weights.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "kind": kind, "engines": engines, "actor": actor}) + "\n")

    def note_experience(self, made):
        ray.get(self.actor_model_group.async_save_model())
        shutil.copytree(self.args.ckpt.output_dir, self.folder / f"actor{self.step}")
        arrays = {}
        for experience in made.experiences:
            for row, index in enumerate(experience.index):
                for name in NOTED:
                    arrays[f"{index}/{name}"] = getattr(experience, name)[row].numpy()
        np.savez(
            self.folder / f"experience{self.step}.npz",
            source=np.array([origin.source for origin in made.origins]),
            on_policy=np.array([origin.on_policy for origin in made.origins]),
            log_ratios=made.log_ratios,
            **arrays,
        )


ProbeTrainerActor = ray.remote(ProbeTrainer)

"""Trainers under watch: they write down what the rollout engines held and what the loss was given (see probe.py)."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import ray

from bapo_openrlhf.training.trainer import trainer
from bapo_openrlhf.training.trainer.experience import ExperienceMaker
from bapo_openrlhf.training.trainer.generator import Generator

NOTED = (
    "sequences", "attention_mask", "action_mask", "action_log_probs", "rollout_log_probs", "base_action_log_probs",
    "values", "returns",
)  # fmt: skip


class ProbeGenerator(Generator):
    """Notes the engines' weights at each generation, and the step for which it is."""

    def make(self, rollout, generation):
        self.note("fresh", rollout.step)
        super().make(rollout, generation)

    def generate(self, kind, prompts, generation):
        if kind != "evaluation":
            self.note("reevaluated", self.state.step)
        return super().generate(kind, prompts, generation)


class ProbeMaker(ExperienceMaker):
    """Saves what the loss is given, with the actor's weights of that step."""

    def forward(self, origins, *, policies=True, **models):
        if not policies:  # what only the critic passes
            return super().forward(origins, policies=policies, **models)
        self.weights_versions = [origin.group.weights_version_of(origin.response) for origin in origins]
        self.segments = [origin.response.segments for origin in origins]
        return super().forward(origins, **models)

    def finish(self, passed, kept, **how):
        experience = super().finish(passed, kept, **how)
        self.note_experience(experience, kept)
        return experience


class ProbeTrainer(trainer.AdaptedPPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.folder = Path(os.environ["PROBE_FOLDER"])
        self.samples_generator.__class__ = ProbeGenerator
        self.samples_generator.rollouts.make = self.samples_generator.make
        self.samples_generator.note = self.note
        self.experience_maker.__class__ = ProbeMaker
        self.experience_maker.note_experience = self.note_experience

    def note(self, kind, step):
        self.write(step, kind, ray.get([engine.weight_checksums.remote() for engine in self.vllm_engines]))

    def write(self, step, kind, weights):
        with (self.folder / "weights.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "kind": kind, "weights": weights}) + "\n")

    def note_actor(self):
        refs = self.actor_model_group.async_run_method(method_name="weight_checksums")
        self.write(self.state.step, "actor", ray.get(refs)[:1])

    def train_step(self, *args):
        self.note_actor()
        return super().train_step(*args)

    def note_experience(self, batch, kept):
        step, pretraining = self.state.step, self.state.phase == "pretraining the critic"
        ray.get(self.actor_model_group.async_save_model())
        name = f"{'pretraining' if pretraining else 'actor'}{step}"
        shutil.copytree(self.args.ckpt.output_dir, self.folder / name)
        arrays = {}
        for index, sample in enumerate(batch.samples):
            fields = {name: getattr(sample, name) for name in NOTED}
            arrays |= {f"{index}/{name}": value[0].numpy() for name, value in fields.items() if value is not None}
            segments = self.experience_maker.segments[kept[index]]
            arrays[f"{index}/segments"] = np.array(segments, dtype=int).reshape(-1, 2)
        np.savez(
            self.folder / f"{'pretraining' if pretraining else 'experience'}{step}.npz",
            source=np.array([origin.source for origin in batch.origins]),
            on_policy=np.array([origin.on_policy for origin in batch.origins]),
            log_ratios=batch.log_ratios,
            weights_version=np.array([self.experience_maker.weights_versions[place] for place in kept]),
            **arrays,
        )


class AgentProbeTrainer(ProbeTrainer):
    def note(self, *_):
        """Asks for no digests of weights."""

    note_actor = note


class VisionProbeTrainer(ProbeTrainer):
    """Notes also the paths of the images of each sample that the loss is given."""

    def note_experience(self, batch, kept):
        super().note_experience(batch, kept)
        images = {index: sample.images[0] for index, sample in enumerate(batch.samples)}
        (self.folder / f"images{self.state.step}.json").write_text(json.dumps(images))


ProbeTrainerActor = ray.remote(ProbeTrainer)
AgentProbeTrainerActor = ray.remote(AgentProbeTrainer)
VisionProbeTrainerActor = ray.remote(VisionProbeTrainer)

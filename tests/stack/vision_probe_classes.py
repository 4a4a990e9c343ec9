"""The trainer under watch, which also writes down each sample's images (see vision_probe.py and probe_classes.py)."""

import json

import probe_classes
import ray


class VisionProbeTrainer(probe_classes.ProbeTrainer):
    """Notes the paths of the images of each sample that the loss is given."""

    def note_experience(self, batch, kept):
        super().note_experience(batch, kept)
        images = {index: sample.images[0] for index, sample in enumerate(batch.samples)}
        (self.folder / f"images{self.state.step}.json").write_text(json.dumps(images))


VisionProbeTrainerActor = ray.remote(VisionProbeTrainer)

"""The trainer under watch, which also writes down each sample's images (see vision_probe.py and probe_classes.py)."""

import json

import probe_classes
import ray


class VisionProbeTrainer(probe_classes.ProbeTrainer):
    """Notes the paths of the images of each sample that the loss is given."""

    def note_experiences(self, experiences):
        super().note_experiences(experiences)
        images = {
            index: experience.images[row] for experience in experiences for row, index in enumerate(experience.index)
        }
        (self.folder / f"images{self.step}.json").write_text(json.dumps(images))


VisionProbeTrainerActor = ray.remote(VisionProbeTrainer)
